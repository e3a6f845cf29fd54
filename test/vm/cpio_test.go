package vm

import (
	"bytes"
	"fmt"
	"path"
)

// An archive is an initramfs in the cpio format newc (Linux,
// Documentation/driver-api/early-userspace/buffer-format.rst). It is not compressed:
// decompressing it in the guest would take longer than copying it on the host.
type archive struct {
	bytes.Buffer
	names map[string]bool // entries by name
}

// The file types in a Linux mode.
const (
	isDir  = 0o040000
	isFile = 0o100000
	isLink = 0o120000
)

// add adds a file by its absolute name, after its parent directories.
func (a *archive) add(name string, mode uint32, data []byte) {
	a.mkdir(path.Dir(name))
	a.entry(name, isFile|mode, data)
}

func (a *archive) symlink(name, target string) {
	a.mkdir(path.Dir(name))
	a.entry(name, isLink|0o777, []byte(target))
}

func (a *archive) mkdir(name string) {
	if name == "/" || a.names[name] {
		return
	}
	a.mkdir(path.Dir(name))
	a.entry(name, isDir|0o755, nil)
}

// end returns the complete archive.
func (a *archive) end() []byte {
	a.entry("/TRAILER!!!", 0, nil)
	return a.Bytes()
}

func (a *archive) entry(name string, mode uint32, data []byte) {
	if a.names == nil {
		a.names = make(map[string]bool)
	}
	a.names[name] = true
	name = name[1:] + "\x00"
	a.WriteString("070701")
	for _, field := range []int{
		0, int(mode), // inode, mode
		0, 0, 1, 0, // user, group, links, time
		len(data),
		0, 0, 0, 0, // devices
		len(name),
		0, // checksum, unused in this format
	} {
		fmt.Fprintf(a, "%08x", field)
	}
	a.WriteString(name)
	a.pad()
	a.Write(data)
	a.pad()
}

// pad aligns the next field to four bytes.
func (a *archive) pad() { a.Write(make([]byte, -a.Len()&3)) }
