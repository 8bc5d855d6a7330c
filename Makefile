.PHONY: demo test chaos lint benchmark benchmark-sandboxes install clean

demo: install  ## train a small coding agent on the real stack, from nothing
	@.venv/bin/argosy demo

test: install  ## all tests, on real services
	.venv/bin/python -m pytest

chaos: install  ## kill -9 of workers, learner and Redis at random: SEEDS times (20), SECONDS of it (15)
	.venv/bin/python tests/buffer/chaos.py --seeds $(or $(SEEDS),20) --seconds $(or $(SECONDS),15)

lint: install  ## style and types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	mkdir -p .venv/types && ln -sfn ../.. .venv/types/argosy && cd .venv/types && ../bin/mypy --cache-dir=../mypy -p argosy

benchmark: install  ## what the buffer costs, against raw Redis
	@.venv/bin/python benchmarks/buffer.py

benchmark-sandboxes: install  ## what sandboxes cost, against plain bubblewrap and Docker (which needs an engine)
	@.venv/bin/python benchmarks/sandbox.py

install:  ## a virtual environment, Redis and bubblewrap; returns at once when nothing changed
	@deploy/install.sh

clean:  ## forget the runs (the virtual environment stays)
	rm -rf runs
