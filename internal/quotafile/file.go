// Package quotafile keeps what is claimed of quotas in a file, safe from a crash.
//
// After its first line the file has one for each write, with a checksum and all records that were written: the last record of a name
// counts. Lines are appended, and from time to time the file is written anew with the records that count. A line that a crash left
// unfinished is at the end, and was never in use; so it is cut off. Anything else that is wrong is an error: a quota must not begin again.
//
// An embedded database was tried first. bbolt ends the process when its file was cut short, and needs two syncs for each write; this
// needs one.
package quotafile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/safefile"
	"shaperd.dev/shaperd/shaper/quota"
)

// File is a file of quotas. Its methods must not be called concurrently.
type File struct {
	folder *os.File
	name   string
	lock   *os.File
	file   *os.File                 // nil if it has to be written anew
	size   int64                    // of the whole lines
	total  int                      // records in them, that count or not
	live   map[string]*quota.Record // those that count
}

// header is the first line.
const header = "shaperd quotas 1"

// entry is a record in a line, which after its checksum is an array of them.
type entry struct {
	Name   string
	Record *quota.Record // nil if it was removed
}

// maxSize is the maximum size of the file: 50,000 keys of rolling quotas take 20 MB.
const maxSize = 1 << 30

// How many records the file has at most for each that counts, and some, before it is written anew.
const (
	rewriteRatio = 4
	rewriteSlack = 10_000
)

// How long Open waits for another process to close the file.
const (
	lockTimeout = 2 * time.Second
	lockRetry   = 10 * time.Millisecond
)

var table = crc32.MakeTable(crc32.Castagnoli)

// Open opens the file at a path, or makes it, and returns the records in it, by the name of their budget, without those that are over
// at now. Only one process may have it open.
func Open(path string, now time.Time) (_ *File, _ map[string]*quota.Record, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("quotas in %s: %w", path, err)
		}
	}()
	f := &File{name: filepath.Base(path), live: map[string]*quota.Record{}}
	if f.folder, err = os.Open(filepath.Dir(path)); err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	if f.lock, err = os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, nil, err
	}
	for wait := lockTimeout; ; wait -= lockRetry { // a process that was killed may be about to end
		if err = unix.Flock(int(f.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
			break
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) || wait <= 0 {
			return nil, nil, fmt.Errorf("another process has it open: %w", err)
		}
		time.Sleep(lockRetry)
	}
	if err := os.Remove(path + ".next"); err != nil && !errors.Is(err, os.ErrNotExist) { // a crash left it
		return nil, nil, err
	}
	if f.file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600); err != nil {
		return nil, nil, err
	}
	if err := f.read(); err != nil {
		return nil, nil, err
	}
	for name, r := range f.live {
		if r.Over(now) {
			delete(f.live, name)
		}
	}
	if err := f.rewrite(); err != nil {
		return nil, nil, err
	}
	records := make(map[string]*quota.Record, len(f.live))
	for name, r := range f.live {
		records[name] = r
	}
	return f, records, nil
}

// read reads the lines of the file.
func (f *File) read() error {
	text, err := io.ReadAll(io.LimitReader(f.file, maxSize+1))
	if err != nil {
		return err
	}
	if len(text) > maxSize {
		return fmt.Errorf("has more than %d bytes", maxSize)
	}
	if len(text) == 0 {
		return nil
	}
	const advice = "what was used is not known: restore the file, or remove it to begin all quotas again"
	text, ok := bytes.CutPrefix(text, []byte(header+"\n"))
	if !ok {
		return errors.New("line 1 is damaged, or this is another file; " + advice)
	}
	if len(text) == 0 {
		return errors.New("line 2 is missing; " + advice) // it was written with the first
	}
	for n := 2; len(text) > 0; n++ {
		one, rest, whole := bytes.Cut(text, []byte{'\n'})
		entries, err := parse(one)
		if err == nil && !whole {
			err = errors.New("it has no end")
		}
		if err != nil {
			if n > 2 && (!whole || !isWhole(one)) && isUnfinished(rest) { // the second was renamed into place with the first
				return nil
			}
			return fmt.Errorf("line %d is damaged: %w; %s", n, err, advice)
		}
		for _, e := range entries {
			f.put(e.Name, e.Record)
		}
		text = rest
	}
	return nil
}

// isUnfinished reports whether a damaged line is what a crash left of the last write: no whole line follows it.
func isUnfinished(rest []byte) bool {
	for one := range bytes.SplitSeq(rest, []byte{'\n'}) {
		if isWhole(one) {
			return false
		}
	}
	return true
}

// isWhole reports whether a line was written as it is. It may have records that this host does not understand.
func isWhole(text []byte) bool {
	_, err := check(text)
	return err == nil
}

func parse(text []byte) (entries []entry, err error) {
	body, err := check(text)
	if err == nil {
		err = json.Unmarshal(body, &entries)
	}
	return entries, err
}

// check returns a line without its checksum.
func check(text []byte) (body []byte, err error) {
	sum, body, ok := bytes.Cut(text, []byte{' '})
	want, err := strconv.ParseUint(string(sum), 16, 32)
	switch {
	case !ok || err != nil:
		return nil, errors.New("it has no checksum")
	case uint32(want) != crc32.Checksum(body, table):
		return nil, errors.New("its checksum is another")
	}
	return body, nil
}

// appendLine appends a line with records to a text.
func appendLine(to *bytes.Buffer, records map[string]*quota.Record) error {
	entries := make([]entry, 0, len(records))
	for name, r := range records {
		entries = append(entries, entry{name, r})
	}
	body, err := json.Marshal(entries)
	if err == nil {
		fmt.Fprintf(to, "%08x %s\n", crc32.Checksum(body, table), body)
	}
	return err
}

func (f *File) put(name string, r *quota.Record) {
	if r == nil {
		delete(f.live, name)
	} else {
		f.live[name] = r
	}
}

// Write implements conn.QuotaStore.
func (f *File) Write(records map[string]*quota.Record) error {
	var text bytes.Buffer
	if err := appendLine(&text, records); err != nil {
		return err
	}
	if f.file == nil || f.total+len(records) > rewriteRatio*len(f.live)+rewriteSlack || f.size > maxSize/2 && f.total > 2*len(f.live) {
		if err := f.rewrite(); err != nil {
			return err
		}
	}
	_, err := f.file.WriteAt(text.Bytes(), f.size)
	if err == nil {
		err = unix.Fdatasync(int(f.file.Fd()))
	}
	if err != nil {
		// What is in the file is not known now. All of it is written anew the next time.
		err = fmt.Errorf("write quotas: %w", err)
		_ = f.file.Truncate(f.size)
		_ = f.file.Close()
		f.file = nil
		return err
	}
	f.size += int64(text.Len())
	f.total += len(records)
	for name, r := range records {
		f.put(name, r)
	}
	return nil
}

// rewrite writes the file anew, with the lines that count.
func (f *File) rewrite() error {
	var text bytes.Buffer
	text.WriteString(header + "\n")
	if err := appendLine(&text, f.live); err != nil {
		return err
	}
	if f.file != nil { // it may be replaced, whatever the errors that follow
		_ = f.file.Close()
		f.file = nil
	}
	if err := safefile.Write(f.folder, f.name, text.Bytes(), safefile.Ownership{Mode: 0o600, UID: -1}, nil); err != nil {
		return fmt.Errorf("write quotas: %w", err)
	}
	next, err := os.OpenFile(filepath.Join(f.folder.Name(), f.name), os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	f.file, f.size, f.total = next, int64(text.Len()), len(f.live)
	return nil
}

// Close closes the file.
func (f *File) Close() error {
	var errs []error
	for _, o := range []*os.File{f.file, f.lock, f.folder} {
		if o != nil {
			errs = append(errs, o.Close())
		}
	}
	return errors.Join(errs...)
}
