# What is installed, and packaged. Packages are the same bytes wherever and whenever they are built
# from a commit, by the same versions of Go and of the tools.

# The processor: amd64, arm64, armv7 or riscv64.
ARCH ?= $(shell $(GO) env GOARCH)
ARCHES := amd64 arm64 armv7 riscv64
PACKAGE_VERSION ?= $(shell packaging/version)
# Where packages go.
DIST ?= $(CURDIR)/build/dist

# The time in packages and manual pages is that of the last commit.
epoch := $(shell git -c safe.directory='$(CURDIR)' log -1 --format=%ct 2>/dev/null)
install deb packages image sbom: export SOURCE_DATE_EPOCH ?= $(epoch)

program := $(if $(filter $(shell $(GO) env GOARCH),$(ARCH)),bin/shaperd,bin/$(ARCH)/shaperd)

.PHONY: bin/$(ARCH)/shaperd
bin/$(ARCH)/shaperd:
	mkdir -p bin/$(ARCH)
	GOARCH=$(patsubst armv7,arm,$(ARCH)) GOARM=7 $(compile) -o $@ ./cmd/shaperd

.PHONY: install
install: build install-docs $(filter-out bin/shaperd,$(program))
	install -D -m 0755 $(program) '$(DESTDIR)/usr/bin/shaperd'
	install -D -m 0644 systemd/shaperd.service '$(DESTDIR)/usr/lib/systemd/system/shaperd.service'
	install -D -m 0644 systemd/shaperd.sysusers '$(DESTDIR)/usr/lib/sysusers.d/shaperd.conf'
	install -D -m 0644 systemd/shaperd.catalog '$(DESTDIR)/usr/lib/systemd/catalog/shaperd.catalog'
	install -d -m 0755 '$(DESTDIR)/etc/shaperd/conf.d'
	install -d -m 0755 '$(DESTDIR)/usr/share/man/man8'
	umask 022; bin/shaperd man --dir '$(DESTDIR)/usr/share/man/man8'
	install -d -m 0755 '$(DESTDIR)/usr/share/bash-completion/completions' '$(DESTDIR)/usr/share/zsh/vendor-completions' '$(DESTDIR)/usr/share/fish/vendor_completions.d'
	umask 022; bin/shaperd completion bash >'$(DESTDIR)/usr/share/bash-completion/completions/shaperd'
	umask 022; bin/shaperd completion zsh >'$(DESTDIR)/usr/share/zsh/vendor-completions/_shaperd'
	umask 022; bin/shaperd completion fish >'$(DESTDIR)/usr/share/fish/vendor_completions.d/shaperd.fish'

# What needs no program: the pages, with links that lead to the installed examples, and the examples.
doc := $(DESTDIR)/usr/share/doc/shaperd
pages = $(wildcard README.md SECURITY.md docs/*.md docs/*/*.md)

.PHONY: install-docs
install-docs:
	install -d -m 0755 '$(doc)/examples' $(patsubst %,'$(doc)/%',$(sort $(dir $(pages))))
	for page in $(pages); do \
		sed -E '/^\[Contributing\]/d; s,(\]\(|`)((\.\./)*)(api|configs|systemd)/,\1\2examples/,g' "$$page" | \
			install -m 0644 /dev/stdin '$(doc)/'"$$page"; done
	install -m 0644 docs/*.svg docs/*.png '$(doc)/docs/'
	install -m 0644 CHANGELOG.md LICENSE NOTICE '$(doc)/'
	install -m 0644 api/openapi.json configs/*.toml configs/*.json configs/alerts.yml configs/prometheus.yml systemd/*.conf '$(doc)/examples/'
	umask 022; cp -R --no-preserve=mode,ownership configs/ansible configs/keepalived configs/kubernetes '$(doc)/examples/'
	install -D -m 0644 configs/fail2ban/shaperd.conf '$(doc)/examples/fail2ban/shaperd.conf'
	install -D -m 0755 configs/crowdsec/shaperd-bouncer '$(doc)/examples/crowdsec/shaperd-bouncer'

# A Debian package, checked by lintian.
debian-arch := $(patsubst armv7,armhf,$(ARCH))

.PHONY: deb
deb:
	packaging/install-tools deb
	packaging/debian-changelog '$(PACKAGE_VERSION)' >debian/changelog
	mkdir -p '$(DIST)'
	env $$(dpkg-architecture -a $(debian-arch) 2>/dev/null) GOCACHE="$$($(GO) env GOCACHE)" GOMODCACHE="$$($(GO) env GOMODCACHE)" \
		debian/rules clean binary VERSION='$(VERSION)' DESTINATION='$(DIST)'
	lintian --fail-on error,warning --suppress-tags initial-upload-closes-no-bugs \
		'$(DIST)'/shaperd_$(subst -,~,$(PACKAGE_VERSION))-1_$(debian-arch).deb

# An rpm, an apk, an ipk, and a tarball of what "make install" installs.
staged := build/package/$(ARCH)
packager := $(GO) tool -modfile='$(CURDIR)/tools/packaging.mod'
export NFPM_ARCH = $(patsubst armv7,arm7,$(ARCH))
machine-amd64 := x86_64
machine-arm64 := aarch64
machine-armv7 := armv[78]*
machine-name-armv7 := armv7
tarball = shaperd-$(PACKAGE_VERSION)-linux-$(ARCH)
# The processor as uname prints it: a pattern, and the name in files for OpenWrt.
machine := $(or $(value machine-$(ARCH)),$(ARCH))
machine-name := $(or $(value machine-name-$(ARCH)),$(machine))

.PHONY: packages
packages:
	rm -rf '$(staged)'
	$(MAKE) install ARCH=$(ARCH) DESTDIR='$(staged)/root'
	cp -R packaging/rpm packaging/openrc packaging/procd '$(staged)/'
	sed -i 's/@MACHINE@/$(machine)/' '$(staged)/procd/preinstall'
	chmod -R u=rwX,go=rX '$(staged)' # whatever the umask
	find '$(staged)' -exec touch --date="@$$SOURCE_DATE_EPOCH" {} +
	mkdir -p '$(DIST)'
	cd '$(staged)' && for target in rpm: apk: ipk:shaperd_$(subst -,~,$(PACKAGE_VERSION))-1_$(machine-name).ipk; do \
		PACKAGE_VERSION='$(PACKAGE_VERSION)' $(packager) nfpm package -f '$(CURDIR)/packaging/nfpm.yaml' -p "$${target%%:*}" -t '$(DIST)'/"$${target#*:}"; done
	tar -C '$(staged)/root' --sort=name --owner=0 --group=0 --numeric-owner --format=ustar --transform='s,^\.,$(tarball),' -c . | \
		gzip -9n >'$(DIST)/$(tarball).tar.gz'

# A container image for all processors.
.PHONY: image
image:
	for arch in $(ARCHES); do $(MAKE) bin/$$arch/shaperd ARCH=$$arch; done
	mkdir -p '$(DIST)'
	$(GO) run ./packaging/oci -o '$(DIST)/shaperd-$(PACKAGE_VERSION)-oci.tar' -version '$(PACKAGE_VERSION)' $(foreach arch,$(ARCHES),$(arch)=bin/$(arch)/shaperd)

# What is compiled into the program, as CycloneDX.
.PHONY: sbom
sbom: build
	mkdir -p '$(DIST)'
	GOFLAGS='-trimpath $(GOFLAGS)' $(packager) cyclonedx-gomod bin -json -std -noserial -notimestamp -version 'v$(PACKAGE_VERSION)' \
		-output '$(DIST)/shaperd-$(PACKAGE_VERSION).cdx.json' bin/shaperd

# Everything that is published. MINISIGN_KEY is the file of the secret key, which asks for its password;
# without it nothing is signed.
MINISIGN_KEY ?=

.PHONY: release
release:
	rm -rf '$(DIST)'
	for arch in $(ARCHES); do $(MAKE) deb packages ARCH=$$arch; done
	$(MAKE) image sbom
	packaging/notes '$(PACKAGE_VERSION)' >'$(DIST)/NOTES.md'
	cd '$(DIST)' && sha256sum -- * >SHA256SUMS
	$(if $(MINISIGN_KEY),packaging/install-tools sign && minisign -S -s '$(MINISIGN_KEY)' -t 'shaperd $(PACKAGE_VERSION)' -m '$(DIST)/SHA256SUMS',@echo 'not signed: MINISIGN_KEY names no key')

# Builds everything from two copies of the source, and compares the bytes.
.PHONY: test-reproducible
test-reproducible:
	packaging/reproduce
