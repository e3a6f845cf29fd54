package quotafile

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/shaper/quota"
)

var now = time.Date(2026, 11, 28, 15, 50, 0, 0, time.UTC)

func record(used ...uint64) *quota.Record {
	return &quota.Record{Period: quota.Period{Calendar: quota.Month, Zone: "UTC"}, Start: time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC), Used: used}
}

func open(t *testing.T, path string) (*File, map[string]*quota.Record) {
	t.Helper()
	f, records, err := Open(path, now)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f, records
}

func write(t *testing.T, f *File, records map[string]*quota.Record) {
	t.Helper()
	if err := f.Write(records); err != nil {
		t.Fatal(err)
	}
}

func TestFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.quotas")
	f, records := open(t, path)
	if len(records) != 0 {
		t.Fatalf("a new file has %v", records)
	}
	over := record(9)
	over.Start = over.Start.AddDate(0, -1, 0)
	write(t, f, map[string]*quota.Record{"a": record(1), "b|source=192.0.2.1/32": record(2), "over": over})
	write(t, f, map[string]*quota.Record{"a": nil, "c": record(3), "absent": nil})
	if _, _, err := Open(path, now); err == nil || !strings.Contains(err.Error(), "another process has it open") {
		t.Errorf("opening it a second time: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		f, records = open(t, path)
		if diff := cmp.Diff(map[string]*quota.Record{"b|source=192.0.2.1/32": record(2), "c": record(3)}, records); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
		f.Close()
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("mode %v, err %v", info.Mode(), err)
	}
}

// A file that was damaged is an error that says where, never a panic, nor a quota that begins again.
func TestOpen_Damaged(t *testing.T) {
	whole := filepath.Join(t.TempDir(), "state.quotas")
	f, _ := open(t, whole)
	for i := range 20 {
		write(t, f, map[string]*quota.Record{fmt.Sprint("key", i): record(uint64(i))})
	}
	f.Close()
	text, err := os.ReadFile(whole)
	if err != nil {
		t.Fatal(err)
	}
	for name, damage := range map[string]func(b []byte){
		"a bit of the first line": func(b []byte) { b[40] ^= 1 },
		"a checksum":              func(b []byte) { b[len(header)+1] = '?' },
		"zeros":                   func(b []byte) { clear(b[100:300]) },
		"the header":              func(b []byte) { b[3] ^= 1 },
	} {
		path := filepath.Join(t.TempDir(), "state.quotas")
		b := bytes.Clone(text)
		damage(b)
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if f, records, err := Open(path, now); err == nil {
			t.Errorf("%s: opened with %d records", name, len(records))
			f.Close()
		} else if !strings.Contains(err.Error(), path+": line ") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Whatever a crash leaves of the last write, what was written before is there.
func TestOpen_TornWrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.quotas")
	f, _ := open(t, path)
	write(t, f, map[string]*quota.Record{"a": record(1)})
	before := f.size
	write(t, f, map[string]*quota.Record{"a": record(2)})
	f.Close()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for size := before; size < int64(len(text)); size++ {
		for name, torn := range map[string][]byte{
			"cut":   text[:size],
			"zeros": append(bytes.Clone(text[:size]), make([]byte, int64(len(text))-size)...),
		} {
			if err := os.WriteFile(path, torn, 0o600); err != nil {
				t.Fatal(err)
			}
			f, records, err := Open(path, now)
			if err != nil {
				t.Fatalf("%s after %d bytes of the last line: %v", name, size-before, err)
			}
			if len(records) != 1 || records["a"].Used[0] != 1 {
				t.Errorf("%s after %d bytes of the last line: %v", name, size-before, records["a"])
			}
			if err := f.Write(map[string]*quota.Record{"b": record(3)}); err != nil {
				t.Error(err)
			}
			f.Close()
		}
	}
}

// Damage to the line that a rewrite has made is an error: it was renamed into place, so no crash leaves that.
func TestOpen_DamagedAfterRewrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.quotas")
	f, _ := open(t, path)
	for i := range 20 {
		write(t, f, map[string]*quota.Record{fmt.Sprint("key", i): record(uint64(i))})
	}
	f.Close()
	f, _ = open(t, path) // a restart
	f.Close()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	bit := bytes.Clone(text)
	bit[len(bit)/2] ^= 1
	for name, b := range map[string][]byte{
		"another bit":         bit,
		"the first half":      text[:len(text)/2],
		"no end of line":      text[:len(text)-1],
		"only the first line": text[:len(header)+1],
	} {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if f, records, err := Open(path, now); err == nil {
			t.Errorf("%s: opened with %d records of 20", name, len(records))
			f.Close()
		}
	}
}

// A line with a record that this host does not understand, since it lacks the time zone, is an error and no unfinished one.
func TestOpen_UnknownZone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.quotas")
	f, _ := open(t, path)
	write(t, f, map[string]*quota.Record{"a": record(1)})
	const body = `[{"Name":"b","Record":{"Unit":0,"Period":"day US/Gone","Start":1,"Used":[7]}}]`
	if _, err := fmt.Fprintf(io.NewOffsetWriter(f.file, f.size), "%08x %s\n", crc32.Checksum([]byte(body), table), body); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if f, records, err := Open(path, now); err == nil {
		t.Errorf("opened with %d records of 2", len(records))
		f.Close()
	}
}

// When the file that a rewrite has made cannot be opened, nothing is written to the one that it replaced.
func TestOpen_AfterFailedRewrite(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "a")
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(folder, "state.quotas")
	f, _ := open(t, path)
	write(t, f, map[string]*quota.Record{"a": record(1)})
	f.total = rewriteRatio*len(f.live) + rewriteSlack - 1 // a write of two rewrites it, and a write of one does not
	if err := os.Rename(folder, folder+"2"); err != nil {
		t.Fatal(err)
	}
	if err := f.Write(map[string]*quota.Record{"a": record(5), "b": nil}); err == nil {
		t.Error("the rewrite did not fail")
	}
	if err := os.Rename(folder+"2", folder); err != nil {
		t.Fatal(err)
	}
	write(t, f, map[string]*quota.Record{"a": record(9)})
	f.lock.Close() // as a crash does
	if _, records := open(t, path); records["a"].Used[0] != 9 {
		t.Errorf("after a crash the file has %d of 9", records["a"].Used[0])
	}
}

// The file does not grow with the number of writes.
func TestFile_Rewrites(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.quotas")
	f, _ := open(t, path)
	for i := range 3 * rewriteSlack / 100 {
		records := map[string]*quota.Record{}
		for j := range 100 {
			records[fmt.Sprint("key", j)] = record(uint64(i))
		}
		write(t, f, records)
	}
	if f.total > rewriteSlack+100*(1+rewriteRatio) {
		t.Errorf("%d records in the file for 100 that count", f.total)
	}
	f.Close()
	if _, records := open(t, path); len(records) != 100 || records["key7"].Used[0] != 3*rewriteSlack/100-1 {
		t.Errorf("%d records, one of them %v", len(records), records["key7"])
	}
}

// What could not be written is not claimed, and once there is space again all is well.
func TestWrite_DiskFull(t *testing.T) {
	folder := t.TempDir()
	if err := unix.Mount("tmpfs", folder, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(folder, unix.MNT_DETACH) })
	path := filepath.Join(folder, "state.quotas")
	f, _ := open(t, path)
	write(t, f, map[string]*quota.Record{"a": record(1)})
	filler := filepath.Join(folder, "filler")
	if err := os.WriteFile(filler, make([]byte, 64<<10), 0o600); err == nil {
		t.Fatal("the disk is not full")
	}
	failed := 0
	for i := range 200 {
		if f.Write(map[string]*quota.Record{"a": record(uint64(i + 2)), "b": record(1)}) != nil {
			failed++
		}
	}
	if failed == 0 {
		t.Fatal("no write failed")
	}
	last := *f.live["a"]
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	write(t, f, map[string]*quota.Record{"c": record(5)})
	f.Close()
	_, records := open(t, path)
	if diff := cmp.Diff(&last, records["a"]); diff != "" || records["c"] == nil {
		t.Errorf("after a full disk: %v, -want +got:\n%s", records, diff)
	}
}

func BenchmarkWrite(b *testing.B) {
	f, _, err := Open(filepath.Join(b.TempDir(), "state.quotas"), now)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	for i := 0; b.Loop(); i++ {
		if err := f.Write(map[string]*quota.Record{"a": record(uint64(i))}); err != nil {
			b.Fatal(err)
		}
	}
}
