package redis

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestTarget(t *testing.T) {
	for url, want := range map[string]target{
		"redis://10.0.0.9:6379":                    {addresses: []string{"10.0.0.9:6379"}},
		"rediss://[fd00::9]:6379":                  {addresses: []string{"[fd00::9]:6379"}, tls: true},
		"unix:///run/redis/redis.sock":             {addresses: []string{"/run/redis/redis.sock"}},
		"redis+cluster://a:1,b:2":                  {addresses: []string{"a:1", "b:2"}, cluster: true},
		"rediss+sentinel://a:26379,[fd00::1]:1/m1": {addresses: []string{"a:26379", "[fd00::1]:1"}, master: "m1", tls: true},
	} {
		got, err := newTarget(Options{URL: url, Prefix: "shaperd", Group: "default"})
		if err != nil || !slices.Equal(got.addresses, want.addresses) || got.master != want.master || got.cluster != want.cluster || got.tls != want.tls {
			t.Errorf("%s: %+v, %v", url, got, err)
		}
		if keys := fmt.Sprint(got.keys()); !strings.HasPrefix(keys, "[{shaperd:default}:state ") {
			t.Error(keys)
		}
	}
}

// TestMistakes has options that are wrong: no call is made, and no error shows the URL.
func TestMistakes(t *testing.T) {
	good := Options{URL: "redis://127.0.0.1:1", Prefix: "shaperd", Group: "default"}
	mistakes := map[string]func(*Options){
		"no prefix":        func(o *Options) { o.Prefix = "" },
		"no group":         func(o *Options) { o.Group = "" },
		"brace":            func(o *Options) { o.Group = "a}b" },
		"certificate only": func(o *Options) { o.CertFile = "c" },
		"key only":         func(o *Options) { o.KeyFile = "k" },
	}
	for _, url := range []string{
		"", "hunter2", "redis://", "redis://a", "redis://a:1,b:1", "redis://a:1/0", "redis://:hunter2@a:1", "redis+sentinel://a:1", "unix://run/hunter2",
		"shaperd://hunter2:1", "http://hunter2:1", "redis+hunter2://a:1", "redis://a:1?password=hunter2", "redis+cluster://a:1,hunter2",
	} {
		mistakes[url] = func(o *Options) { o.URL = url }
	}
	for what, change := range mistakes {
		o := good
		change(&o)
		if _, err := New(o).Snapshot(within(t, soon)); err == nil || strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "connect") {
			t.Errorf("%q: %v", what, err)
		}
	}
	if _, err := New(good).Snapshot(within(t, soon)); err == nil || !strings.Contains(err.Error(), "connect to 127.0.0.1:1") {
		t.Error(err)
	}
}
