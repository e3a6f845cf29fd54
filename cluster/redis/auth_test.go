package redis

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// aclCommands are what a user of the server needs.
var aclCommands = []string{
	"evalsha", "script|load", "info", "time", "hget", "hgetall", "hset", "hdel", "hlen", "zadd", "zcard", "zrange", "zrangebyscore", "zrem",
	"zremrangebyscore", "unlink",
}

const password = "hunter2-%s$' \xff"

// setUser gives a user of the server these commands only.
func setUser(admin func(...string) any, commands []string) {
	rules := []string{"ACL", "SETUSER", "shaperd", "reset", "on", ">" + password, "~{shaperd:test}:*"}
	for _, c := range commands {
		rules = append(rules, "+"+c)
	}
	admin(rules...)
}

// TestACL gives a user what the documentation says, all of which is needed.
func TestACL(t *testing.T) {
	onServers(t, func(t *testing.T, binary string) {
		sv := startServer(t, binary)
		admin := sv.admin(t)
		o := Options{
			URL: "unix://" + sv.socket, Username: "shaperd", ClientName: "gw1", Password: func() (string, error) { return password, nil },
		}
		attempt := func(commands []string) error {
			setUser(admin, commands)
			admin("FLUSHALL")
			admin("SCRIPT", "FLUSH")
			return useEverything(t, openStore(t, o))
		}
		if err := attempt(aclCommands); err != nil {
			t.Fatal(err)
		}
		for i, c := range aclCommands {
			if err := attempt(slices.Delete(slices.Clone(aclCommands), i, i+1)); err == nil {
				t.Errorf("%s is not needed", c)
			}
		}
		setUser(admin, aclCommands)
		c, err := (&target{Options: o}).connect(within(t, soon), sv.socket)
		if err != nil {
			t.Fatal(err)
		}
		defer c.close()
		for _, command := range [][]string{
			{"HGETALL", "{shaperd:other}:state"}, {"HGETALL", "x"}, {"FLUSHALL"}, {"KEYS", "*"}, {"GET", "{shaperd:test}:state"}, {"CONFIG", "GET", "*"},
		} {
			replies, err := c.do(within(t, soon), command)
			if err != nil {
				t.Fatal(err)
			}
			if e, refused := replies[0].(serverError); !refused || e.code() != "NOPERM" {
				t.Errorf("%q: %v", command, replies[0])
			}
		}
	})
}

// TestACL_Documented compares the commands with those in the documentation.
func TestACL_Documented(t *testing.T) {
	text, err := os.ReadFile("../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rule, _ := strings.Cut(string(text), "ACL SETUSER shaperd")
	rule, _, _ = strings.Cut(rule, "\n\n")
	var documented []string
	for word := range strings.FieldsSeq(rule) {
		if c, is := strings.CutPrefix(word, "+"); is {
			documented = append(documented, c)
		}
	}
	slices.Sort(documented)
	if want := slices.Sorted(slices.Values(aclCommands)); !slices.Equal(documented, want) {
		t.Errorf("documented %q, needed %q", documented, want)
	}
}

// TestPassword_Rotated changes the password on the server and in its file.
func TestPassword_Rotated(t *testing.T) {
	onServers(t, func(t *testing.T, binary string) {
		sv := startServer(t, binary, "--requirepass", "first")
		admin := sv.admin(t)
		admin("AUTH", "first")
		file := filepath.Join(t.TempDir(), "password")
		write := func(text string) {
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		write("first\n")
		c := newCaller(t, openStore(t, Options{URL: "unix://" + sv.socket, Password: PasswordFile(file)}))
		c.mustCall()
		admin("CONFIG", "SET", "requirepass", "second")
		admin("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
		_, _ = c.call()
		if _, err := c.call(); err == nil || !strings.Contains(err.Error(), "wrong user or password") {
			t.Errorf("the old password: %v", err)
		}
		write("second\r\n")
		c.mustCall()
	})
}

func TestPasswordFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "password")
	if _, err := PasswordFile(file)(); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	for text, want := range map[string]string{"a b\n": "a b", "x\n\n": "x\n", " y ": " y ", "\n": "", "": ""} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := PasswordFile(file)(); got != want || (err != nil) != (want == "") {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
}

// TestSecrets has servers that repeat in an error what they were sent, as Redis does with commands that it does not
// know. No error shows the password, nor do the options and the store.
func TestSecrets(t *testing.T) {
	shown := map[string]string{}
	show := func(what string, v any) {
		for _, format := range []string{"%v", "%+v", "%#v", "%s", "%q"} {
			shown[what+" as "+format] = fmt.Sprintf(format, v)
		}
	}
	for _, username := range []string{"", "shaperd"} {
		for what, answer := range map[string]func([]string) string{
			"unknown command": func(c []string) string {
				return fmt.Sprintf("-ERR unknown command '%s', with args beginning with: '%s'\r\n", c[0], strings.Join(c[1:], "' '"))
			},
			"password as a code": func(c []string) string { return "-" + c[len(c)-1] + "\r\n" },
			"wrong":              func(c []string) string { return "-WRONGPASS " + c[len(c)-1] + "\r\n" },
			"not permitted":      func(c []string) string { return "-NOPERM " + c[len(c)-1] + "\r\n" },
			"close":              func([]string) string { return "close" },
			"binary":             func(c []string) string { return c[len(c)-1] + "\r\n" },
			"two replies":        func(c []string) string { return "+OK\r\n-" + c[len(c)-1] + "\r\n" },
			"two lines":          func(c []string) string { return "+OK\r\n" + c[len(c)-1] + "\r\n" },
		} {
			for _, sentinel := range []bool{false, true} {
				f := startFake(t, func(conn int, command []string) string {
					switch command[0] {
					case "AUTH":
						return answer(command)
					case "SENTINEL":
						return "-NOAUTH Authentication required.\r\n"
					}
					return likeRedis(conn, command)
				})
				o := Options{URL: "redis://" + f.address, Username: username, Password: func() (string, error) { return "HUNTER2", nil }}
				if sentinel {
					o.URL = sentinelURL(f.address)
				}
				s := openStore(t, o)
				_, err := try(t, s)
				if err == nil || f.countAsked("HUNTER2") != 1 {
					t.Errorf("%s: %v\n%s", what, err, f.all())
				}
				show(fmt.Sprint("error after ", what, sentinel, username), err)
				show("store", s)
				show("options", o)
				show("target", s.target)
				show("contents of target", *s.target)
			}
		}
	}
	for what, text := range shown {
		if strings.Contains(text, "HUNTER2") {
			t.Errorf("%s: %s", what, text)
		}
	}
	if len(shown) < 40 {
		t.Errorf("only %d texts", len(shown))
	}
}
