# `make help` lists the targets.
.DEFAULT_GOAL := help
.PHONY: help build demo demo-cluster demo-python test test-python wheel soak fuzz miri instructions
.PHONY: test-rdma test-times vm bench-verbs bench-clients bench-cluster bench-compare bench-python bench-resp bench-tcp
.PHONY: pictures slow-link install install-c deb deb-test check-configs package site tour-test deny clean

export RUSTDOCFLAGS ?= -D warnings
# In CI everything is built once, so preparation for the next build would be wasted. Backtraces
# without lines are built faster.
ifdef CI
export CARGO_INCREMENTAL ?= 0
export CARGO_PROFILE_DEV_DEBUG ?= 0
endif
# How many seconds clients, and then servers, are killed while histories are recorded.
export FARSIDE_HISTORY_SECONDS ?= 20
# The test of all sizes writes this many times the region's bytes.
export FARSIDE_BALANCE_PASSES ?= 10

help: ## Lists the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

build: ## Builds the commands into target/release, and installs the packages that this needs
	@tools/scripts/needs.sh
	@tests/vm/needs.sh --build
	. tools/scripts/verbs-env.sh && \
	    cargo build --release --locked --bin kv-server --bin kv-cli --bin kv-resp --bin kv-bench \
	        --bin kv-compare

demo: ## Loads a real tree of files (DIR=...), dumps and compares it, runs a short benchmark
	@tools/scripts/needs.sh
	@tools/scripts/demo.sh

demo-cluster: build ## Shows a cluster of three servers: loads a tree (DIR=...), kills a server, restarts it
	@tools/scripts/needs.sh --etcd
	@PATH="$$PWD/target/release:$$PATH" tools/scripts/demo-cluster.sh

demo-python: build ## Builds the Python package, installs it in a venv, and runs a short program
	@tools/scripts/demo-python.sh

test-python: ## Builds the Python wheel, installs it in a clean venv, and runs its tests
	@tools/scripts/needs.sh
	@tests/vm/needs.sh --build
	. tools/scripts/verbs-env.sh && cargo build --locked -p farside-c && cargo build --locked \
	    --bin kv-server --bin kv-cli --bin kv-resp --bin rust-client && \
	    tools/scripts/test-python.sh --all-fabrics $(PYTHON_TEST)

wheel: ## Builds the Python wheel for manylinux_2_28, and checks it: target/wheels
	@tools/scripts/needs.sh
	@tools/scripts/wheel.sh

bench-python: build ## Compares calls from Python with Rust, redis-py and a raw READ
	@client/python/needs.sh
	cargo build --release --locked -p farside-python --examples
	@tools/scripts/demo-python.sh --install
	target/python-venv/bin/python client/python/bench/calls.py

test: ## Checks format, lints, packages and documentation; runs the tests, some of them over RDMA
	@tools/scripts/needs.sh --test
	@tools/scripts/nextest.sh --needs
	@tests/vm/needs.sh
	cargo fmt --check
	. tools/scripts/verbs-env.sh && \
	    cargo clippy --workspace --all-targets --locked -- -D warnings && \
	    CARGO_NET_OFFLINE=true tools/scripts/package.sh --no-build && \
	    cargo doc --workspace --no-deps --locked && \
	    cargo build --workspace --lib --bins --tests --locked && \
	    tools/scripts/test.sh

test-times: ## Prints the slowest forty tests of the last `make test`
	@tools/scripts/test-times.py

MINUTES ?= 10
soak: ## Records histories for MINUTES=10 each while all faults happen: one server, a cache, a cluster, a bad network; then runs what `make test` leaves out because it takes long
	@tools/scripts/needs.sh
	@tests/vm/needs.sh
	. tools/scripts/verbs-env.sh && \
	    export FARSIDE_SOAK_MINUTES=$(MINUTES) FARSIDE_BUILT=1 && \
	    cargo build --release --workspace --locked --bin kv-server --bin kv-cli && \
	    cargo test --release --workspace --locked --test integration -- \
	    --ignored --nocapture --test-threads=3 \
	    histories::soak histories::caches cluster::histories::soak network:: long_puts:: && \
	    cargo test --release --workspace --locked --test simulation -- --ignored && \
	    FARSIDE_SIMULATION_SECONDS=60 cargo test --release --workspace --locked \
	    --test simulation -- random::seeds && \
	    cargo build --workspace --lib --bins --tests --locked && \
	    tools/scripts/nextest.sh --workspace --locked --test integration --test commands -- \
	    --ignored _in_soak && \
	    tools/scripts/msrv.sh
	$(MAKE) test-rdma
	$(MAKE) test-python
	$(MAKE) test-python PYTHON_TEST=--rdma

SECONDS ?= 60
fuzz: ## Fuzzes every decoder with libFuzzer, SECONDS=60 each; needs nightly and cargo-fuzz
	@tools/scripts/needs.sh
	@tools/scripts/fuzz.sh $(SECONDS) $(TARGETS)

miri: ## Runs the tests of layout, hash and messages under Miri; needs nightly
	@tools/scripts/needs.sh
	@tools/scripts/miri.sh

instructions: ## Counts a client's instructions for an operation, and compares them with those recorded
	@tools/scripts/needs.sh
	@tools/scripts/instructions.sh

test-rdma: ## Runs the tests over RDMA; with FARSIDE_TEST_DEVICE=ADDRESS on this machine's device
	@tests/vm/needs.sh
	. tools/scripts/verbs-env.sh && tests/vm/suite --all && tests/vm/two-hosts

vm: ## Builds the guest in which tests find soft-RoCE, and installs the packages that this needs
	@tests/vm/build.sh

bench-verbs: build ## Compares with perftest over soft-RoCE, in one guest: target/bench-verbs.json
	@tests/vm/needs.sh
	@tests/vm/build.sh
	@tests/vm/bench-verbs

bench-compare: build ## Compares with published protocols, in one guest: target/bench-compare-*.json
	@tests/vm/needs.sh
	@tests/vm/build.sh
	@tests/vm/bench-compare

bench-cluster: build ## Measures clusters of 1 to 16 servers on an emulated network: target/bench-cluster/
	@tools/scripts/bench-cluster.sh

bench-tcp: ## Measures TCP beside an echo, redis and memcached, servers and clients on a core each
	@tools/scripts/needs.sh
	@tests/vm/needs.sh --build
	. tools/scripts/verbs-env.sh && tools/scripts/bench-tcp.sh

bench-clients: ## Compares a GET through the client libraries of other languages with one in Rust
	@tools/scripts/needs.sh
	@tests/vm/needs.sh --build
	. tools/scripts/verbs-env.sh && tools/scripts/bench-clients.sh

bench-resp: ## Compares kv-resp with redis-server, by redis-benchmark: target/bench-resp/README.md
	@tools/scripts/needs.sh
	@tests/vm/needs.sh --build
	. tools/scripts/verbs-env.sh && tools/scripts/bench-resp.sh

slow-link: ## Measures large values over RDMA on a link of 25 MB/s, at each depth, in one guest
	@tools/scripts/needs.sh
	@tests/vm/needs.sh
	. tools/scripts/verbs-env.sh && \
	    cargo build --release --locked --bin kv-server --bin slow-link
	@tests/vm/slow-link

PREFIX ?= /usr/local
install-c: ## Builds the client library for C, and installs it (PREFIX=/usr/local, DESTDIR)
	@tools/scripts/needs.sh
	@tests/vm/needs.sh --build
	. tools/scripts/verbs-env.sh && cargo build --release --locked -p farside-c
	client/c/install.sh --prefix "$(PREFIX)" --built "$${CARGO_TARGET_DIR:-target}/release"

install: build ## Installs commands, manual pages, completions and units (PREFIX=/usr/local, DESTDIR)
	tools/scripts/install.sh --prefix "$(PREFIX)" --built "$${CARGO_TARGET_DIR:-target}/release"

deb: build ## Packages commands, services and the client library for C for Debian: target/deb
	. tools/scripts/verbs-env.sh && cargo build --release --locked -p farside-c
	tools/scripts/deb.sh

deb-test: deb ## Tests the packages with lintian, in a clean Debian and its systemd, and the image; as root
	tools/scripts/test-deb.sh

check-configs: ## Checks units, Dockerfile, Helm chart, Kubernetes manifests and workflows
	tools/scripts/check-configs.sh

package: ## Packages the crates that users need, and checks their content
	@tools/scripts/needs.sh
	@tests/vm/needs.sh --build
	tools/scripts/package.sh

site: ## Builds a site of all pages and of the API, with search, and checks its links: target/site/book
	@tools/scripts/needs.sh
	tools/scripts/site.sh

tour-test: build ## Runs the commands of docs/tour.md, and compares what they print with the page
	tools/scripts/needs.sh --test
	tools/scripts/demo-python.sh --install
	$(MAKE) install-c PREFIX="$$PWD/target/tour" DESTDIR=
	cargo build --release --locked -p farside --example counter
	$(MAKE) vm
	tools/scripts/tour.py

pictures: build ## Draws docs/pictures from a terminal that runs commands; needs tmux and PyPI
	tools/scripts/pictures.sh

deny: ## Checks licences, sources and known vulnerabilities of all dependencies
	command -v cargo-deny >/dev/null || cargo install --locked cargo-deny
	tools/scripts/deny.sh

clean: ## Removes all build output
	cargo clean
