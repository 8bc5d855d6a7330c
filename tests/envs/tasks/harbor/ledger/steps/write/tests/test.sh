[ "$(tr '\n' ' ' <ledger.txt)" = "1 2 " ] && reward=1 || reward=0
echo "{\"reward\": $reward, \"lines\": $(wc -l <ledger.txt || echo 0)}" >/logs/verifier/reward.json
