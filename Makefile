# make fuzz, make test: set .venv up if it is missing, half-made or not of these pins, then run.
# ARGS goes to pytest as the shell reads it: make fuzz ARGS='--kernel "triton*"'
PYTHON ?= python3
ARGS ?=

.PHONY: fuzz fuzz-peers test mutants soak planted lint verify-interpreter clean

fuzz: .venv
	.venv/bin/python -P -m pytest -n auto fuzz/ $(ARGS)

# Other people's kernels (kernels/peers/), in an environment that has them beside what .venv has. A finding makes it fail.
PEERS := vllm sglang flag_gems pytorch

fuzz-peers: .venv/peers/made
	.venv/peers/bin/python -P -m pytest -n auto fuzz/ --device cpu --hypothesis-profile peers $(PEERS:%=--kernel '%*') $(ARGS)

.venv/peers/made: requirements-peers.txt | .venv
	.venv/bin/python -m venv --clear $(@D)
	.venv/bin/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-peers.txt
	@touch $@

test: .venv
	.venv/bin/python -P -m pytest -n auto tests/ --device cpu $(ARGS)

# Which planted bugs die, and by what. ARGS='--only "triton*" --seeds 1' for a few of them, ARGS=--idle for what could be
# switched off, ARGS='--device cuda' for compiled kernels. Without ARGS the page that the README links to is written again.
mutants: .venv
	@mkdir -p .pagefuzz
	.venv/bin/python -P tests/mutants/matrix.py $(or $(ARGS),--markdown docs/mutants-matrix.md --json .pagefuzz/mutants.json)

# Right kernels, however they are written, must never be accused. MINUTES=60 for a night's first hour.
MINUTES ?= 10

soak: .venv
	.venv/bin/python -P tests/soak.py --minutes $(MINUTES) $(ARGS)

# Kernels that crash, hang or eat the memory, twenty times each, by the command line. ARGS='--device cuda --times 2' on a
# card.
planted: .venv
	.venv/bin/python -P tests/planted $(ARGS)

# mypy takes a module's name from its directory's: the link gives the tree the name that it imports as.
lint: .venv
	.venv/bin/python -m ruff check
	.venv/bin/python -m ruff format --check
	@mkdir -p .venv/named && ln -sfn ../.. .venv/named/pagefuzz
	MYPYPATH=.venv/named .venv/bin/python -m mypy -p pagefuzz

# .venv/made-for is written last and names all that the environment depends on: any other content, or none, means "again".
export MADE_FOR := $(CURDIR), $(shell { $(PYTHON) --version; } 2>&1), pins $(shell cksum < requirements.txt)
ifneq "$(shell cat .venv/made-for 2>/dev/null)" "$(MADE_FOR)"
.PHONY: .venv
endif

.venv:
	@command -v $(PYTHON) >/dev/null || { echo "pagefuzz needs Python 3.11 or newer, and there is no $(PYTHON) here: install it, or name another with 'make PYTHON=...'." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "pagefuzz needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1): name a newer one with 'make PYTHON=...'." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "pagefuzz needs Python's venv module, and $(PYTHON) has none: install it (on Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@printf '%s\n' "$$MADE_FOR" > .venv/made-for

# Every byte and every exception of the memoised interpreter against the corrected one, 20,000 launches of random kernels
# on each version of triton that it is meant for. ARGS='--launches 1000' for fewer.
VERIFIED := 3.6.0 3.7.1 3.9.0

verify-interpreter: $(VERIFIED:%=.venv/triton-%/made)
	@failed=; for version in $(VERIFIED); do .venv/triton-$$version/bin/python tests/same_bits $(ARGS) || failed=1; done; [ -z "$$failed" ]

# The interpreter of triton before 3.7 needs numpy before 2.4.
.venv/triton-%/made: | .venv
	$(PYTHON) -m venv --clear $(@D)
	grep -Ev '^(triton|numpy|mypy|ruff)==' requirements.txt > $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --quiet -r $(@D)/requirements.txt triton==$* 'numpy$(if $(filter 3.6.%,$*),<2.4,==2.4.6)'
	@touch $@

# Keeps .pagefuzz, where saved failures lie.
clean:
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
