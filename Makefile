# Every target sets up .venv by itself. PYTHON chooses the interpreter, 3.11 to 3.13.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# Of pyproject.toml; CI wants the kernels' compiler too.
EXTRAS ?= test
# Where it is set, as in many containers, each process of each engine would compile our modules anew:
# a seventh of the suite's time.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo serve test test-long test-clients test-npu docs lint bench clean

# What users install: no compilers, linters or clients of the tests. Modules are compiled when they
# are first imported, which most never are.
.venv/.installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 14), "nanoactor needs Python 3.11 to 3.13, this is " + sys.version'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable .
	@# After `pip install .`, files that Numba has cached there remain, and would hide the checkout.
	rm -rf .venv/lib/python3.*/site-packages/nanoactor
	touch $@

.venv/.ready: .venv/.installed
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

demo: .venv/.installed
	$(BIN)/nanoactor generate demo "$$(printf 'ROMEO:\nBut soft, what light')" --max-tokens 200 --min-tokens 150

serve: .venv/.installed
	$(BIN)/nanoactor serve demo

# Both invocations run to their end, and leave what failed and their exit status for .ci/again.py.
LEFT := .pytest_cache
USUAL := not gpu and not long
# Files with a test that needs all cores to itself, so that the others need not be collected again.
ALONE = $(shell grep -rl --include='*.py' 'mark[.]alone' tests)

test: .venv/.ready
	@rm -rf $(LEFT) && mkdir -p $(LEFT)/shared $(LEFT)/alone
	$(PYTEST) -o cache_dir=$(LEFT)/shared --ignore=tests/npu -n 3 --dist worksteal \
		-m '$(USUAL) and not alone'; echo $$? > $(LEFT)/shared/status
	$(PYTEST) -o cache_dir=$(LEFT)/alone $(ALONE) \
		-m '$(USUAL) and alone'; echo $$? > $(LEFT)/alone/status
	@! grep -vx 0 $(LEFT)/*/status

# Tests of what `.venv-clients` has.
CLIENTS := tests/server/test_clients.py tests/examples/test_langchain_chat.py

# Hours on two cores; the soak test alone takes half an hour. Each part runs, whatever failed before.
test-long: .venv/.ready .venv-clients/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[eval,examples]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps trl
	@failed=0; \
	$(PYTEST) -n 2 --dist worksteal -m 'not gpu and not alone' || failed=1; \
	$(PYTEST) -m 'not gpu and alone' || failed=1; \
	.venv-clients/bin/python -m pytest -m 'not gpu' $(CLIENTS) || failed=1; \
	exit $$failed

# Apart, as some of the clients need an older `openai` than the one that tests/server is about.
.venv-clients/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv-clients
	.venv-clients/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test,clients]'
	touch $@

# Programs of others, in environments of their own: the newest versions, some 900 MB.
.clients/.ready: Makefile
	mkdir -p .clients
	npm install --prefix .clients --no-audit --no-fund --silent node@24 openai @anthropic-ai/sdk \
		@anthropic-ai/claude-code @openai/codex ai @ai-sdk/openai @ai-sdk/anthropic zod
	touch $@

test-clients: .venv-clients/.ready .clients/.ready
	.venv-clients/bin/python -m pytest -m 'not gpu' $(CLIENTS) tests/clients

# torch_npu and stand-ins for CANN, apart from everything else: in a normal environment both would
# break `import torch`. The rest is .venv's.
TORCH_NPU := torch_npu==2.13.0
.venv-npu/.ready: .venv/.ready constraints.txt tests/npu/cann_stub.py
	$(PYTHON) -m venv --clear .venv-npu
	.venv-npu/bin/python -m pip install --quiet --no-compile --no-deps $(TORCH_NPU) protobuf pyelftools
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(.venv-npu/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 .venv-npu/bin/python -m tests.npu.cann_stub .venv-npu/cann
	touch $@

# The Ascend ladder without an NPU: docs/ascend.md says what each rung proves. LONG=1 for all of it.
test-npu: .venv-npu/.ready
	$(BIN)/python -m tests.npu.ladder $(if $(LONG),--long)

# Apart from the engine, whose sources the site's tools only read. npm has the script that draws
# diagrams; without npm they stay text.
.venv-docs/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv-docs
	$(PYTHON) -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*project["optional-dependencies"]["docs"], sep="\n")' | .venv-docs/bin/python -m pip \
		install --quiet --constraint constraints.txt --requirement /dev/stdin
	npm pack --silent --pack-destination .venv-docs mermaid@11.17.2 && tar -xzf .venv-docs/mermaid-*.tgz \
		-C .venv-docs --strip-components=2 package/dist/mermaid.min.js || echo "no npm: diagrams stay text"
	touch $@

# The site, in build/site. To see changes at once: .venv-docs/bin/mkdocs serve -f docs/site/mkdocs.yml
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --config-file docs/site/mkdocs.yml

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python bench/depth.py
	$(BIN)/python bench/messaging.py
	$(BIN)/python bench/overlap.py --rounds 1

clean:
	rm -rf .venv .venv-clients .venv-docs .venv-npu .clients build dist *.egg-info
