[ "$(cat sum.txt)" = "$WANTED apples" ] && echo 1.0 >/logs/verifier/reward.txt || echo 0.0 >/logs/verifier/reward.txt
