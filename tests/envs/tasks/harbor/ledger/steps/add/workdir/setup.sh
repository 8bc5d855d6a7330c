echo apples >unit.txt
rm setup.sh
