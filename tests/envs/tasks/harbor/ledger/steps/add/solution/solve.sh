echo "$(paste -sd+ ledger.txt | xargs -I{} sh -c 'echo $(({}))') $(cat unit.txt)" >sum.txt
