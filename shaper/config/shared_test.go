package config

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const sharedLimit = listenDB + "[[limit]]\nname = \"l\"\nrate = \"10Mbit/s\"\nshared = true\n"

// TestShared_Files has [shared] in two files: paths are relative to each, and conditions are met
// by keys of the other.
func TestShared_Files(t *testing.T) {
	folder := write(t, "shaperd.toml", sharedLimit+`
[shared]
hosts     = 4
group     = "mainframe"
store     = ["shaperd://gw1.internal:9466", "shaperd://[fd00:0::2]:9466"]
lease     = "3s"
interval  = "1s"
alone     = "closed"
failover  = "strict"
ca_file   = "tls/ca.pem"
cert_file = "/etc/tls/cert.pem"
`, "conf.d/host.toml", "[shared]\nname = \"gw1\"\nserve = \":9466\"\nkey_file = \"shared.key\"\n")
	c, err := Load(filepath.Join(folder, "shaperd.toml"))
	if err != nil {
		t.Fatal(err)
	}
	want := Shared{
		Hosts: 4, Name: "gw1", Group: "mainframe", Store: []string{"shaperd://gw1.internal:9466", "shaperd://[fd00::2]:9466"},
		CAFile: filepath.Join(folder, "tls/ca.pem"), CertFile: "/etc/tls/cert.pem", KeyFile: "shared.key",
		Prefix: "shaperd", Lease: 3 * time.Second, Interval: time.Second, Alone: AloneClosed, Failover: FailoverStrict, Serve: ":9466",
	}
	if diff := cmp.Diff(want, c.Shared); diff != "" {
		t.Error(diff)
	}

	_, err = Load(filepath.Join(write(t, "shaperd.toml", sharedLimit+"[shared]\nhosts = 4\n", "conf.d/a.toml", "[shared]\nhosts = 5\n"), "shaperd.toml"))
	if err == nil || !strings.Contains(err.Error(), "hosts: duplicate key, already set at") {
		t.Errorf("hosts in two files: %v", err)
	}
}

// TestShared_FileNextToConfiguration has a path without a folder: it is not the name of a
// credential.
func TestShared_FileNextToConfiguration(t *testing.T) {
	text := sharedLimit + "[shared]\nhosts = 4\nstore = \"redis://h:1\"\npassword_file = \"./redis.pass\"\n"
	c, err := load([]*file{newFile("shaperd.toml", 0, text)})
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Shared.PasswordFile; got != "./redis.pass" {
		t.Errorf("password_file is %q", got)
	}
}

func TestParseStore(t *testing.T) {
	for url, want := range map[string]string{
		"redis://10.0.0.9:6379":                         "",
		"rediss://redis.internal:6379":                  "",
		"redis://[::ffff:10.0.0.9]:6379":                "redis://10.0.0.9:6379",
		"unix:///run/redis//redis@1.sock":               "unix:///run/redis/redis@1.sock",
		"redis+sentinel://a:26379,[fd00::1]:26379/my.1": "",
		"rediss+cluster://a:6379,b:6379":                "",
		"rediss+cluster://a:6379":                       "",
		"shaperd://10.0.0.1:9466":                       "",
	} {
		if want == "" {
			want = url
		}
		if got, err := parseStore(url); got != want || err != nil {
			t.Errorf("%s is %q, %v", url, got, err)
		}
	}
}

// TestStore_PasswordIsNotShown has passwords where people put them: each is refused, and no error
// repeats it.
func TestStore_PasswordIsNotShown(t *testing.T) {
	for _, line := range []string{
		`store = "redis://shaperd:hunter2@10.0.0.9:6379"`, `store = "redis://:hunter2@10.0.0.9:6379"`, `store = "redis://hunter2@10.0.0.9:6379"`,
		`store = "redis://:hunter2"`, `store = "redis://10.0.0.9:6379:hunter2"`, `store = "redis://10.0.0.9:6379?password=hunter2"`,
		`store = "redis://10.0.0.9:6379/hunter2"`, `store = "redis://10.0.0.9:6379#hunter2"`, `store = "unix://:hunter2@/run/redis.sock"`,
		`store = "unix:///run/redis.sock?password=hunter2"`, `store = "redis+sentinel://:hunter2@a:1,b:1/m"`, `store = "redis+sentinel://a:1/:hunter2"`,
		`store = "redis+cluster://a:1,:hunter2@b:1"`, `store = "shaperd://:hunter2@a:1"`, `store = "hunter2@redis://a:1"`, `store = ":hunter2@a:6379"`,
		`store = "hunter2"`, `store = redis://:hunter2@a:6379`, `store = ["redis://:hunter2@a:1", "redis://:hunter2@a:1"]`,
		`store = { url = "redis://:hunter2@a:1" }`, `password = "hunter2"`,
	} {
		_, err := load([]*file{newFile("f.toml", 0, sharedLimit+"[shared]\nhosts = 4\n"+line+"\n")})
		if err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", line, err)
		}
	}
}

func TestSummary_Shared(t *testing.T) {
	c := mustLoad(t, sharedLimit+"[shared]\nhosts = 4\n")
	if got, want := c.Summary(&c.Limits[0]), "10Mbit/s, queue 200ms, shared by 4 hosts"; got != want {
		t.Errorf("summary is %q, want %q", got, want)
	}
}

// TestCanonical_Shared checks the keys that the reference has in comments.
func TestCanonical_Shared(t *testing.T) {
	c := mustLoad(t, sharedLimit+"[shared]\nhosts = 4\nstore = \"redis://h:1\"\npassword_file = \"redis.pass\"\n")
	var text strings.Builder
	if err := c.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	const want = `shared
  hosts                4
  group                default
  store                redis://h:1
  password_file        redis.pass
  prefix               shaperd
  lease                1s
  interval             100ms
  alone                share
  failover             fast
`
	if !strings.Contains(text.String(), "\n"+want+"\n") {
		t.Errorf("text is\n%s\nwant in it\n%s", text.String(), want)
	}
	encoded, err := json.Marshal(c.Canonical())
	if err != nil || !strings.Contains(string(encoded), `"alone":"share","failover":"fast"}`) {
		t.Errorf("%s, %v", encoded, err)
	}
}
