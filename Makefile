.PHONY: demo test lint install clean

demo: install  ## train a small coding agent on the real stack, from nothing
	@.venv/bin/argosy demo

test: install  ## all tests, on real services
	.venv/bin/python -m pytest

lint: install  ## style and types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	mkdir -p .venv/types && ln -sfn ../.. .venv/types/argosy && cd .venv/types && ../bin/mypy --cache-dir=../mypy -p argosy

install:  ## a virtual environment, Redis and bubblewrap; returns at once when nothing changed
	@deploy/install.sh

clean:  ## forget the runs (the virtual environment stays)
	rm -rf runs
