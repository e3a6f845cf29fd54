SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

GO ?= go
VERSION ?= $(shell git -c safe.directory='$(CURDIR)' describe --tags --always --dirty 2>/dev/null || echo devel)
FUZZTIME ?= 60s
BENCHTIME ?= 1s
DESTDIR ?=

# The checkout may belong to another user.
export GOFLAGS += -buildvcs=false
# The binary under test.
export SHAPERD_BIN := $(CURDIR)/bin/shaperd

asn := $(CURDIR)/build/asn
valkey := $(CURDIR)/build/valkey
vm := $(CURDIR)/build/vm
# Tests that take long, in test-slow.
slow := ^(TestGroup_.*|TestInstances|TestShed_Class|TestAttach_OpensAfterKill|TestAttach_KeptAfterKill|TestAttachReload|TestClasses_Weights|TestEdgeCases|TestUDP_RateOnBusyHost|TestWakeUps)$$
slow_bpf := ^(TestCap_Dial|TestProxied_NotCounted)$$
# Packages without goroutines, and tests in one.
sequential := cluster cluster/internal/world conn/adaptive conn/internal/fairq conn/penalty control/metrics control/web internal/convert \
	internal/plan internal/quotafile packaging/oci shaper/asn shaper/config shaper/segments systemd
simulations := ^Test(Admission_AgainstModel|Adapt_KeyTakenAway|Assign|Crossing|Lending|Parity|Priority|Reserve|SchedulerChurn|Shares|Tickets)|Large$$
packages = $(shell $(GO) list ./... | grep -v '/test/')

.PHONY: all
all: build

compile = CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w -X main.version=$(VERSION)'

.PHONY: build
build:
	$(compile) -o bin/shaperd ./cmd/shaperd

# Needs root: the tests create network namespaces and switch users. Longer tests run in test-slow, test-kernels and test-long.
.PHONY: test
test: deps build format vet unit outside

.PHONY: deps
deps:
	scripts/install-deps

# A published table of autonomous systems, fetched once.
.PHONY: asn
asn: deps
	shaper/asn/testdata/fetch.sh '$(asn)'

# Valkey, fetched once. Tests of stores run with each of these servers.
.PHONY: valkey
valkey: deps
	scripts/install-valkey '$(valkey)'

export SHAPERD_REDIS_SERVERS := redis-server:$(valkey)/usr/bin/valkey-server

# The kernels that tests boot, fetched once.
.PHONY: vm-kernels
vm-kernels: deps
	test/vm/fetch.sh '$(vm)'

.PHONY: unit
unit: build asn valkey
	SHAPERD_ASN_DATA='$(asn)' $(GO) test -shuffle=on -p 3 -timeout 20m -skip '$(slow_bpf)' $(filter-out %/conn/adaptive,$(packages))
	cd tools/termsvg && $(GO) test -shuffle=on -timeout 2m ./...

# Tests of the built binary. They measure time and therefore run alone.
.PHONY: outside
outside: deps build unit
	$(GO) test -count=1 -shuffle=on -p 1 -timeout 15m -skip '^TestKernels|^TestPackages|^TestProcessors|^TestLong|^TestKeepalived|$(slow)' $(filter-out %/test/examples %/test/from %/test/roots,$(shell $(GO) list ./test/...))

.PHONY: test-slow
test-slow: deps build valkey
	$(GO) test -count=1 -shuffle=on -timeout 15m -run '$(slow)' ./test/netns
	$(GO) test -shuffle=on -timeout 15m -run '$(slow_bpf)' ./bpf
	$(GO) test -shuffle=on -timeout 15m ./conn/adaptive

# The examples for other products, with these.
.PHONY: test-examples
test-examples: deps build
	$(GO) test -count=1 -timeout 10m ./test/examples
	$(GO) test -count=1 -timeout 10m -run '^TestKeepalived' ./test/netns

# The configurations of docs/from, of other programs and of shaperd, side by side. Needs root.
.PHONY: test-from
test-from: deps build peers
	$(GO) test -count=1 -shuffle=on -timeout 5m ./test/from

# Tests inside other kernels, emulated. VMFLAGS=-vm.all runs all in each.
VMFLAGS ?=

.PHONY: test-kernels
test-kernels: deps build vm-kernels
	$(GO) test -count=1 -timeout 30m -run '^TestKernels' ./test/vm $(VMFLAGS)

# The Debian releases that tests boot, installed once. Needs root.
.PHONY: vm-debian
vm-debian: deps
	packaging/install-tools vm
	test/vm/debian.sh '$(vm)'

# Kernels for the other processors that packages are built for, fetched once.
.PHONY: vm-processors
vm-processors: deps
	packaging/install-tools vm
	test/vm/processors.sh '$(vm)'

# The roots that other packages are installed in, made once. Needs root.
.PHONY: roots
roots: deps
	packaging/install-tools vm
	test/roots/roots.sh '$(CURDIR)/build/roots'

# The packages, installed, upgraded and removed in these releases and roots, and the program of each processor.
.PHONY: test-packages
test-packages: deps build vm-debian vm-processors roots
	for version in 1.0.0 2.0.0; do $(MAKE) deb packages ARCH=amd64 VERSION=$$version PACKAGE_VERSION=$$version DIST='$(CURDIR)/build/test-packages'; done
	for arch in arm64 armv7 riscv64; do $(MAKE) packages ARCH=$$arch VERSION=2.0.0 PACKAGE_VERSION=2.0.0 DIST='$(CURDIR)/build/test-packages'; done
	$(GO) test -count=1 -timeout 10m ./test/roots
	$(GO) test -count=1 -timeout 30m -run '^(TestPackages|TestProcessors)$$' ./test/vm

# Long tests: the race detector, the tests called TestLong, random packets, every benchmark once.
.PHONY: test-long
test-long: race-all long fuzz-escape benchmarks-once

# What several goroutines run: without sequential, simulations, comparisons with a model, and large inputs, which the
# detector slows down up to twentyfold. Of bpf, the kernel does most.
.PHONY: race
race: build valkey
	CGO_ENABLED=1 $(GO) test -race -shuffle=on -p 3 -timeout 15m -skip '$(simulations)' $(filter-out $(addprefix %/,bpf $(sequential)),$(packages))
	CGO_ENABLED=1 $(GO) test -race -shuffle=on -timeout 15m -run 'Concurrent|Plane|Sampler|Capture|QueueSetup|LockPins' ./bpf

# The rest as well: twenty minutes on two cores.
.PHONY: race-all
race-all: build asn valkey
	CGO_ENABLED=1 SHAPERD_ASN_DATA='$(asn)' $(GO) test -race -shuffle=on -timeout 60m -skip 'Large$$' $(filter-out %/conn/adaptive,$(packages))

.PHONY: long
long: build race-all
	$(GO) test -count=1 -p 1 -timeout 15m -run '^TestLong' ./test/...
	$(GO) test -count=1 -timeout 15m -run '^(TestParity|TestShares_Parity)$$' ./bpf -policies 200

# Leaves out each rule of shared limits that has a mutant, and expects the checks to find that.
.PHONY: mutants
mutants:
	$(GO) vet -tags mutants ./cluster
	$(GO) test -count=1 -tags mutants -timeout 10m -run '^TestMutants' -v ./cluster

# Random schedules of faults and random walks for hosts that share limits, and a deep search: 40 minutes on two cores.
SCHEDULES ?= 100000

.PHONY: check-cluster
check-cluster:
	GOGC=1000 $(GO) test -count=1 -timeout 0 -run '^(TestCheck|TestSearch|TestWalk)$$' -v ./cluster -check.schedules '$(SCHEDULES)' -search.depth 5 -walks '$(SCHEDULES)'

# An adaptive limit in front of all simulated servers, next to other controllers, and over a day.
.PHONY: check-adaptive
check-adaptive:
	$(GO) test -count=1 -timeout 60m -v ./conn/adaptive -long -servers all

# Random packets through a router with limits, for ESCAPETIME per kind of limit: exactly the
# packets that arrive must have been charged.
ESCAPETIME ?= 12s

.PHONY: fuzz-escape
fuzz-escape:
	$(GO) test -count=1 -timeout 3h -run '^TestEscape$$' -v ./bpf -escape.time='$(ESCAPETIME)'

.PHONY: benchmarks-once
benchmarks-once: asn valkey race-all long
	SHAPERD_ASN_DATA='$(asn)' $(GO) test -run '^$$' -bench . -benchtime 1x -p 1 -timeout 10m $(packages)

# Tests every package RUNS times while all cores are busy.
RUNS ?= 20

.PHONY: flaky
flaky: deps build asn valkey
	RUNS='$(RUNS)' SHAPERD_ASN_DATA='$(asn)' scripts/flaky $(PACKAGES)

# Compares shaperd with its peers. Needs root and an otherwise idle machine.
BENCH ?=

.PHONY: bench bench-short
bench: build asn peers vm-kernels
	bin/bench $(BENCH)

bench-short: build asn peers vm-kernels
	bin/bench -short $(BENCH)

# Profiles one load: make profile WORK='W1 10 MB/s, 4'. PROGRAM=haproxy profiles a peer. perf needs
# the symbols, which "make build" strips.
WORK ?= W1 10 MB/s, 4
PROGRAM ?= shaperd

.PHONY: profile
profile: asn peers
	CGO_ENABLED=0 $(GO) build -trimpath -o bin/shaperd-profile ./cmd/shaperd
	bin/bench -shaperd bin/shaperd-profile -profile build/profile/'$(PROGRAM)' -programs '$(PROGRAM)' -work '$(WORK)'

# The benchmark harness and the peers, which are fetched once.
.PHONY: peers
peers: deps
	scripts/install-peers build/peers
	$(GO) build -o build/peers/naive ./test/bench/naive
	$(GO) build -o bin/bench ./test/bench

# The Go benchmarks of the packages.
.PHONY: gobench
gobench: valkey
	$(GO) test -run '^$$' -bench . -benchmem -benchtime '$(BENCHTIME)' -p 1 -timeout 60m $(packages)

# Needs root, and nothing but Go.
.PHONY: demo
demo: build
	$(GO) run ./test/demo

# The pictures of the documents, from real runs. Needs root.
.PHONY: pictures
pictures: deps build
	scripts/pictures

# One limit over three gateways, beside what peers do. Needs root.
.PHONY: demo-cluster
demo-cluster: deps build
	scripts/install-peers build/peers
	$(GO) build -o build/peers/perhit ./test/demo/perhit
	$(GO) run ./test/demo/cluster

# A PostgreSQL that is killed under load, behind shaperd and its peers. Needs root.
.PHONY: demo-restart
demo-restart: deps build
	scripts/install-peers build/peers
	scripts/apt-install postgresql
	$(GO) run ./test/demo/restart

# Servers that collapse when they get too much at once, behind an adaptive limit and HAProxy. Needs root.
.PHONY: demo-adapt
demo-adapt: deps build
	scripts/install-peers build/peers
	scripts/apt-install postgresql python3
	$(GO) run ./test/demo/adapt

# Clients that stay connected to PostgreSQL, under caps on connections, turns and transactions. Needs root.
.PHONY: demo-pool
demo-pool: deps build
	scripts/install-peers build/peers
	scripts/apt-install postgresql
	$(GO) run ./test/demo/pool

# A server that is cold after it has started, behind a circuit breaker and its peers. Needs root.
.PHONY: demo-cold
demo-cold: deps build
	scripts/install-peers build/peers
	$(GO) run ./test/demo/cold

.PHONY: lint
lint: format vet golangci generate

.PHONY: format
format: deps
	@files=$$($(GO) tool gofumpt -l .); if [[ -n $$files ]]; then \
		printf 'run "go tool gofumpt -w ." for these:\n%s\n' "$$files" >&2; exit 1; fi
	@clang-format-14 --dry-run --Werror bpf/src/*.[ch]

# The tag adds the tests for other kernels, and leaves nothing out.
.PHONY: vet
vet:
	$(GO) vet -tags vmguest ./...
	cd tools/termsvg && $(GO) vet ./...

# .golangci.yml lists the checks. The linter has a module of its own: it has many dependencies.
golangci := $(GO) tool -modfile='$(CURDIR)/tools/go.mod' golangci-lint run

.PHONY: golangci
golangci:
	$(golangci) --build-tags vmguest ./...
	cd tools/termsvg && $(golangci) ./...

# Needs the network. Reports known vulnerabilities in dependencies.
.PHONY: vuln
vuln:
	$(GO) tool govulncheck ./...

# Fails when the committed files differ from the generated ones.
.PHONY: generate
generate: deps
	$(GO) generate ./...
	git diff --exit-code -- $$(git grep -lE '^// Code generated .* DO NOT EDIT\.$$' -- '*.go') '*.o' docs/configuration.md configs/shaperd.schema.json configs/shaperd.toml

.PHONY: fuzz
fuzz:
	@grep -rEo --include='*_test.go' '^func Fuzz[A-Za-z0-9_]*' . | sort | while IFS=: read -r file target; do \
		target=$${target#func }; \
		echo "$${file%/*} $$target, $(FUZZTIME)"; \
		$(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime '$(FUZZTIME)' -fuzzminimizetime 1s "$${file%/*}" </dev/null; \
	done

include packaging/packages.mk

.PHONY: clean
clean:
	rm -rf bin build
