# Installs, runs, upgrades and removes the package under OpenRC, by the scripts of the package.
cd /test
script() { tar -xzOf "$1" "$2" 2>/dev/null | sh; }
unpack() { tar -tzf "$1" 2>/dev/null | grep -v '^\.' >"/test/$2"; tar -xzf "$1" -C / --exclude='.*' 2>/dev/null; }
old=shaperd_1.0.0-r1_x86_64.apk new=shaperd_2.0.0-r1_x86_64.apk

# As with "apk add", in a root where OpenRC does not run.
script $old .pre-install
unpack $old files
[ "$(id -gn shaperd)" = shaperd ]
[ "$(grep ^shaperd: /etc/passwd | cut -d: -f6-)" = /:/sbin/nologin ]
script $old .pre-install # again, as after a removal
[ "$(grep -c ^shaperd: /etc/passwd)" = 1 ]
[ "$(shaperd version | cut -d' ' -f2)" = 1.0.0 ]

# OpenRC runs from here on.
ip link set lo up
mkdir -p /etc/runlevels/default
for state in daemons exclusive failed inactive options scheduled started starting stopping wasinactive; do mkdir -p /run/openrc/$state; done
echo default >/run/openrc/softlevel
cat >/etc/init.d/networking <<'END'
#!/sbin/openrc-run
depend() { provide net; }
start() { :; }
END
chmod +x /etc/init.d/networking
nc -ll -p 7000 -e cat &
cat >/etc/shaperd/shaperd.toml <<'END'
[[listen]]
name       = "web"
address    = "tcp://127.0.0.1:80"
downstream = "127.0.0.1:7000"
END
await() { for _ in $(seq 100); do if "$@" >/dev/null 2>&1; then return; fi; sleep 0.1; done; "$@"; }
traffic() { [ "$(echo hello | nc -w 5 127.0.0.1 "$1")" = hello ]; }
daemon() { pidof shaperd; }

rc-update add shaperd default
rc-service shaperd start
await traffic 80
rc-service shaperd status
[ "$(stat -c '%U:%a' /var/lib/shaperd)" = shaperd:700 ]
[ "$(stat -c '%U:%a' /run/shaperd)" = shaperd:755 ]
[ "$(stat -c %U "/proc/$(daemon)")" = shaperd ]
grep '^CapEff:.0000000000000400$' "/proc/$(daemon)/status" # CAP_NET_BIND_SERVICE

# A reload of an invalid configuration fails, and the old one stays.
pid=$(daemon)
cp /etc/shaperd/shaperd.toml valid.toml
sed -i 's/"tcp:[^"]*"/["tcp:\/\/127.0.0.1:80", "tcp:\/\/127.0.0.1:81"]/' /etc/shaperd/shaperd.toml
rc-service shaperd reload
traffic 81
echo 'rate = ' >>/etc/shaperd/shaperd.toml
if rc-service shaperd reload; then exit 1; fi
traffic 80
[ "$(daemon)" = "$pid" ]
if rc-service shaperd restart; then exit 1; fi
cp valid.toml /etc/shaperd/shaperd.toml
rc-service shaperd start
await traffic 80

# A crash: the supervisor starts it again.
pid=$(daemon)
kill -9 "$pid"
await traffic 80
[ "$(daemon)" != "$pid" ]

# An upgrade replaces the program. It runs after a restart.
unpack $new files
traffic 80
[ "$(shaperd version | cut -d' ' -f2)" = 2.0.0 ]
rc-service shaperd restart
await traffic 80
cmp valid.toml /etc/shaperd/shaperd.toml

# A removal stops it, and leaves the configuration, the state, and their user.
script $new .pre-deinstall
if daemon; then exit 1; fi
if test -e /etc/runlevels/default/shaperd; then exit 1; fi
grep -v '/$' files | sed 's,^,/,' | xargs rm
grep '/$' files | sort -r | sed 's,^,/,' | xargs rmdir 2>/dev/null || true
left=$(find / -xdev -name '*shaperd*' -not -path '/test/*' -not -path '/proc/*' | sort | tr '\n' ' ')
[ "$left" = '/etc/shaperd /etc/shaperd/shaperd.toml /run/shaperd /var/lib/shaperd ' ]

# In a root where OpenRC does not run, a removal does not fail.
unpack $new files
rm -r /run/openrc
script $new .pre-deinstall
