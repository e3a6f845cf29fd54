# Installs, upgrades and removes the package with rpm, while systemd is not the first process: as in an image that is
# being built. The root is Debian's, whose database of packages rpm does not know.
cd /test
mkdir -p /var/lib/rpm
rpm --initdb
rpm --checksig --nosignature shaperd-2.0.0-1.x86_64.rpm

# What rpm and the scripts print is a mistake, but for the service that was enabled.
quiet() { "$@" >output 2>&1; if grep -vE '^(Creating (group|user) |Created symlink |Removed )' output; then exit 1; fi; }

quiet rpm --install --nodeps shaperd-1.0.0-1.x86_64.rpm
[ "$(shaperd version | cut -d' ' -f2)" = 1.0.0 ]
id shaperd
test -d /etc/shaperd/conf.d
test -L /etc/systemd/system/multi-user.target.wants/shaperd.service
journalctl --catalog-file 2>/dev/null || true
journalctl --list-catalog | grep -q shaperd
rpm --verify --nodeps shaperd
systemd-analyze verify --man=no shaperd.service

# An upgrade keeps the configuration, the state, and that the service is disabled.
cp /usr/share/doc/shaperd/examples/fragile-database.toml /etc/shaperd/shaperd.toml
echo '# mine' >>/etc/shaperd/shaperd.toml
install -d -o shaperd -g shaperd /var/lib/shaperd
touch /var/lib/shaperd/state
systemctl disable shaperd
quiet rpm --upgrade --nodeps shaperd-2.0.0-1.x86_64.rpm
[ "$(shaperd version | cut -d' ' -f2)" = 2.0.0 ]
[ "$(rpm --query shaperd)" = shaperd-2.0.0-1.x86_64 ]
[ "$(tail -n 1 /etc/shaperd/shaperd.toml)" = '# mine' ]
shaperd check /etc/shaperd/shaperd.toml
if test -e /etc/systemd/system/multi-user.target.wants/shaperd.service; then exit 1; fi
rpm --verify --nodeps shaperd

# A removal leaves the configuration, the state and their user.
systemctl enable shaperd
quiet rpm --erase shaperd
left=$(find / -xdev -name '*shaperd*' -not -path '/test/*' | sort | tr '\n' ' ')
[ "$left" = '/etc/shaperd /etc/shaperd/shaperd.toml /var/lib/shaperd ' ]
id shaperd
if journalctl --list-catalog | grep shaperd; then exit 1; fi
