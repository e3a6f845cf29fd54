package netns

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// TestRefusals_RealClients checks what clients of protocols show of a refusal, each in its own words.
func TestRefusals_RealClients(t *testing.T) {
	// An SMPP client of Net::SMPP, which prints the status of the response.
	const bind = `use Net::SMPP; my ($c, $r) = Net::SMPP->new_transceiver($ARGV[0], port => $ARGV[1], system_id => "me", password => "secret")
		or die "no connection\n"; print defined $r ? $r->explain_status : "no response", "\n"`
	host := ipv4.proxy.String()
	for i, tt := range []struct {
		name, reply string
		run         func(port string) []string
		want        string
	}{
		{
			"psql", "postgres",
			func(port string) []string { return []string{"psql", "-w", "-h", host, "-p", port, "-U", "me", "db"} },
			`FATAL:  too many connections, try again in (\d+) seconds\nHINT:  Try again in \d+ s\.`,
		},
		{
			"psql without encryption", "postgres",
			func(port string) []string {
				return []string{"psql", "-w", fmt.Sprintf("host=%s port=%s user=me dbname=db sslmode=disable gssencmode=disable", host, port)}
			},
			`FATAL:  too many connections, try again in (\d+) seconds\n`,
		},
		{
			"psql that insists on encryption", "postgres",
			func(port string) []string {
				return []string{"psql", "-w", fmt.Sprintf("host=%s port=%s user=me dbname=db sslmode=require", host, port)}
			},
			`server does not support SSL, but SSL was required`,
		},
		{
			"mysql", "mysql", // of MariaDB, which asks for encryption
			func(port string) []string { return []string{"mysql", "-h", host, "-P", port, "-u", "me"} },
			`1040 - too many connections, try again in (\d+) seconds\n`,
		},
		{
			"mysql without encryption", "mysql",
			func(port string) []string { return []string{"mysql", "-h", host, "-P", port, "-u", "me", "--skip-ssl"} },
			`^ERROR 1040 \(08004\): too many connections, try again in (\d+) seconds\n`,
		},
		{
			"redis-cli", "redis",
			func(port string) []string { return []string{"redis-cli", "-h", host, "-p", port, "PING"} },
			`^(?:\(error\) )?ERR too many connections, try again in (\d+) seconds\n`,
		},
		{
			"swaks", "smtp",
			func(port string) []string {
				return []string{"swaks", "--server", host, "--port", port, "--to", "you@example.com"}
			},
			`421 4\.7\.0 too many connections, try again in (\d+) seconds\n`,
		},
		{
			"Net::SMPP", "smpp",
			func(port string) []string { return []string{"perl", "-e", bind, host, port} },
			`ESME_RTHROTTLED=0x00000058`,
		},
		{
			"mbpoll", "modbus",
			func(port string) []string { return []string{"mbpoll", "-m", "tcp", "-p", port, "-a", "17", "-1", host} },
			`Slave device or server is busy`,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNetwork(t)
			n.downstream.serveTCP(t, ipv4.tcp(), func(c *net.TCPConn) { _, _ = io.Copy(io.Discard, c) })
			at := netip.AddrPortFrom(ipv4.proxy, uint16(7000+i))
			n.shaper.shaperd(t, fmt.Sprintf("[daemon]\nmetrics = %q\npin_path = %q\n\n[[listen]]\nname = \"door\"\naddress = \"tcp://%v\"\ndownstream = %q\n\n"+
				"[[limit]]\nname = \"few\"\nnew_connections = \"1/min\"\nqueue_timeout = \"0s\"\nrefuse_with = \"reply\"\nreply = %q\n",
				lab.MetricsAddr, unusedPinPath, at, ipv4.tcp().String(), tt.reply))
			start := time.Now() // of the minute, or a little sooner
			c, err := n.client.dialTCP(ipv4.sources[0], at)
			must(t, err)
			defer c.Close()
			command := tt.run(strconv.Itoa(int(at.Port())))
			out, err := n.client.Output(command[0], command[1:]...)
			if err != nil && out == "" {
				t.Fatal(err)
			}
			took := int(time.Since(start)/time.Second) + 1
			t.Logf("%s:\n%s", strings.Join(command[:1], " "), out)
			found := regexp.MustCompile(tt.want).FindStringSubmatch(out)
			if found == nil {
				t.Fatalf("%s prints %q, want %s", command[0], out, tt.want)
			}
			if len(found) > 1 {
				if s, err := strconv.Atoi(found[1]); err != nil || s < 60-took || s > 60 {
					t.Errorf("to come again in %s seconds, want %d to 60", found[1], 60-took)
				}
			}
		})
	}
}
