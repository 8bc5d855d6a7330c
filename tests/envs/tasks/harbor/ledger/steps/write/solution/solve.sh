printf '1\n2\n' >ledger.txt
