# Installs, upgrades and removes the package by its scripts, as opkg does.
cd /test
chmod +x rc.common
ln -s /test/rc.common /etc/rc.common
mkdir -p /etc/rc.d /var/run
unpack() {
	rm -rf control data
	mkdir control data
	tar -xzf "$1" -C data
	tar -xzf data/control.tar.gz -C control
	tar -xzf data/data.tar.gz -C /
	tar -tzf data/data.tar.gz >files
}
script() { name=$1; shift; test ! -e "control/$name" || "./control/$name" "$@"; }
calls() { [ "$(cat procd 2>/dev/null | grep -v ^set | tr '\n' ' ')" = "$1" ]; rm -f procd; }

# For another processor, nothing is installed.
mkdir other
tar -xzf shaperd_2.0.0-1_armv7.ipk -C other
tar -xzf other/control.tar.gz -C other
grep '^Architecture: all$' other/control
if other/preinst install; then exit 1; fi
IPKG_INSTROOT=/elsewhere other/preinst install # into an image

unpack shaperd_1.0.0-1_x86_64.ipk
script preinst install
script postinst configure
calls ''
if /etc/init.d/shaperd enabled; then exit 1; fi
grep '^/etc/shaperd/$' /lib/upgrade/keep.d/shaperd

# Without a valid configuration, it does not start.
if /etc/init.d/shaperd start; then exit 1; fi
calls 'start '
cat >/etc/shaperd/shaperd.toml <<'END'
[[listen]]
name       = "web"
address    = "tcp://127.0.0.1:80"
downstream = "127.0.0.1:7000"
END
/etc/init.d/shaperd check
/etc/init.d/shaperd enable
/etc/init.d/shaperd start
command=$(sed -n 's/^set command //p' procd)
calls 'start '

# The command that procd gets runs, and is reloaded.
ip link set lo up
nc -ll -p 7000 -e cat &
$command 2>log &
pid=$!
for _ in $(seq 100); do if grep -q msg=ready log; then break; fi; sleep 0.1; done
[ "$(echo hello | nc -w 5 127.0.0.1 80)" = hello ]
/etc/init.d/shaperd reload
[ "$(echo hello | nc -w 5 127.0.0.1 80)" = hello ]
kill $pid
wait $pid
test -s /etc/shaperd/state/state

# An upgrade restarts the service, and it stays enabled.
script prerm upgrade 2.0.0-1
calls ''
unpack shaperd_2.0.0-1_x86_64.ipk
script postinst configure
calls 'stop start '
/etc/init.d/shaperd enabled
[ "$(shaperd version | cut -d' ' -f2)" = 2.0.0 ]
# One that was disabled is not started, and with an invalid configuration the old program goes on.
/etc/init.d/shaperd disable
script postinst configure
calls ''
/etc/init.d/shaperd enable
cp /etc/shaperd/shaperd.toml valid.toml
echo 'rate = ' >>/etc/shaperd/shaperd.toml
script postinst configure
calls ''
cp valid.toml /etc/shaperd/shaperd.toml

# A removal leaves the configuration and the state.
IPKG_INSTROOT=/elsewhere script prerm remove
/etc/init.d/shaperd enabled
script prerm remove
calls 'stop '
grep -v '/$' files | sed 's,^\.,,' | xargs rm
left=$(find / -xdev -name '*shaperd*' -not -path '/test/*' -not -path '/proc/*' -type f | sort | tr '\n' ' ')
[ "$left" = '/etc/shaperd/shaperd.toml ' ]
test -s /etc/shaperd/state/state
