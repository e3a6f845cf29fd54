package vm

import (
	"bytes"
	"fmt"
	"path"
)

// An archive is what a kernel unpacks as its first file system: cpio's format
// newc, as Documentation/driver-api/early-userspace/buffer-format.rst of Linux
// has it. It is not compressed: the guest would be slower to unpack it than the
// host is to copy it.
type archive struct {
	bytes.Buffer
	has map[string]bool // names
}

// The kinds of entry, as in a mode of Linux.
const (
	isDir  = 0o040000
	isFile = 0o100000
	isLink = 0o120000
)

// add puts a file at the absolute name, behind the directories above it.
func (a *archive) add(name string, mode uint32, data []byte) {
	a.mkdir(path.Dir(name))
	a.entry(name, isFile|mode, data)
}

func (a *archive) symlink(name, target string) {
	a.mkdir(path.Dir(name))
	a.entry(name, isLink|0o777, []byte(target))
}

func (a *archive) mkdir(name string) {
	if name == "/" || a.has[name] {
		return
	}
	a.mkdir(path.Dir(name))
	a.entry(name, isDir|0o755, nil)
}

// end returns the whole archive.
func (a *archive) end() []byte {
	a.entry("/TRAILER!!!", 0, nil)
	return a.Bytes()
}

func (a *archive) entry(name string, mode uint32, data []byte) {
	if a.has == nil {
		a.has = make(map[string]bool)
	}
	a.has[name] = true
	name = name[1:] + "\x00"
	a.WriteString("070701")
	for _, field := range []int{
		0, int(mode), // inode, mode
		0, 0, 1, 0, // user, group, links, time
		len(data),
		0, 0, 0, 0, // devices
		len(name),
		0, // checksum, which this format has not
	} {
		fmt.Fprintf(a, "%08x", field)
	}
	a.WriteString(name)
	a.pad()
	a.Write(data)
	a.pad()
}

// pad aligns what comes next to four bytes.
func (a *archive) pad() { a.Write(make([]byte, -a.Len()&3)) }
