sed 's/^/hello /' names.txt >greetings.txt
