// Package clients shows why package redis has a client of its own: a few bytes from a server end a process that uses
// one of the well-known clients. It has a module of its own, so that shaperd does not depend on them:
//
//	go test -v .
package clients

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/gomodule/redigo/redis"
	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/redis/rueidis"
)

// replies are what the server says, each to a command that asks for anything.
var replies = map[string]string{
	"array of -2":     "*-2\r\n",
	"string of 2^62":  "$4611686018427387904\r\n",
	"string of 1 TiB": "$1099511627776\r\n",
	"array in array":  strings.Repeat("*1\r\n", 20_000_000),
}

// clients make a request on one connection, without retries, until a deadline, as the ledger needs it: all
// of them can.
var clients = map[string]func(ctx context.Context, address string) (any, error){
	"rueidis": func(ctx context.Context, address string) (any, error) {
		c, err := rueidis.NewClient(rueidis.ClientOption{
			InitAddress: []string{address}, ForceSingleClient: true, DisableRetry: true, DisableCache: true, PipelineMultiplex: -1,
			AlwaysRESP2: true, ClientSetInfo: rueidis.DisableClientSetInfo, Dialer: net.Dialer{KeepAlive: -1},
		})
		if err != nil {
			return nil, err
		}
		return c.Do(ctx, c.B().Arbitrary("EVALSHA").Build()).ToAny()
	},
	"go-redis": func(ctx context.Context, address string) (any, error) {
		c := goredis.NewClient(&goredis.Options{
			Addr: address, PoolSize: 1, MaxActiveConns: 1, MaxRetries: -1, DialerRetries: 1, ContextTimeoutEnabled: true, DisableIdentity: true,
			Protocol: 2, PipelinePoolSize: -1, MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		})
		return c.Do(ctx, "EVALSHA").Result()
	},
	"redigo": func(ctx context.Context, address string) (any, error) {
		c, err := redis.DialContext(ctx, "tcp", address)
		if err != nil {
			return nil, err
		}
		return redis.DoContext(c, ctx, "EVALSHA")
	},
}

func TestClients(t *testing.T) {
	if test := os.Getenv("CLIENT_AND_REPLY"); test != "" {
		name, reply, _ := strings.Cut(test, "/")
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := clients[name](ctx, serve(t, replies[reply]))
		fmt.Printf("error: %.80v\n", err)
		return
	}
	for reply := range replies {
		for name := range clients {
			cmd := exec.Command(os.Args[0], "-test.run=TestClients")
			cmd.Env = append(os.Environ(), "CLIENT_AND_REPLY="+name+"/"+reply)
			out, err := cmd.CombinedOutput()
			for line := range strings.Lines(string(out)) {
				if strings.HasPrefix(line, "panic:") || strings.HasPrefix(line, "fatal error:") || strings.HasPrefix(line, "error:") {
					t.Logf("%-16s %-9s %v, %s", reply, name, err, strings.TrimSpace(line))
				}
			}
		}
	}
}

// serve answers the commands of a handshake as Redis does, and EVALSHA with reply.
func serve(t *testing.T, reply string) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				for r := bufio.NewScanner(c); r.Scan(); {
					switch strings.ToUpper(r.Text()) {
					case "HELLO":
						fmt.Fprint(c, "*4\r\n$6\r\nserver\r\n$5\r\nredis\r\n$5\r\nproto\r\n:2\r\n")
					case "EVALSHA":
						fmt.Fprint(c, reply)
					}
				}
			}()
		}
	}()
	return l.Addr().String()
}
