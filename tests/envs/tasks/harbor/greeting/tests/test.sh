if diff greetings.txt /tests/wanted.txt; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
