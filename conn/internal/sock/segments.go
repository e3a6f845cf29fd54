package sock

import (
	"encoding/binary"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Segments is a sequence of datagrams, all of one size except the last, that are sent in one system
// call and pass the kernel as one (UDP_SEGMENT). It holds no copies: the data must stay valid until it
// is sent.
type Segments struct {
	size   int // bytes of each datagram except the last
	count  int // datagrams
	bytes  int
	sealed bool // the last datagram is shorter, so that none can follow

	header  unix.Msghdr
	vectors [maxSegments]unix.Iovec
	used    int // vectors in use
	control [controlSize]byte
}

const (
	maxSegments     = 64    // UDP_MAX_SEGMENTS
	maxSegmentBytes = 65000 // with headers they are at most 65,535 bytes long
)

// Count returns the number of datagrams.
func (s *Segments) Count() int { return s.count }

// Bytes returns the bytes of all datagrams.
func (s *Segments) Bytes() int { return s.bytes }

// Add adds datagrams of size bytes, the last of which may be shorter, and reports whether they fit.
// They do if s is empty.
func (s *Segments) Add(data []byte, size int) bool {
	n := 1
	if size > 0 {
		n = (len(data) + size - 1) / size
	}
	if s.count > 0 {
		fits := !s.sealed && size > 0 && size <= s.size &&
			(size == s.size || n == 1) && s.count+n <= maxSegments && s.bytes+len(data) <= maxSegmentBytes
		if !fits {
			return false
		}
	} else {
		s.size = size
	}
	s.sealed = size < s.size || len(data) < n*size
	s.vectors[s.used].Base = unsafe.SliceData(data)
	s.vectors[s.used].SetLen(len(data))
	s.used++
	s.count += n
	s.bytes += len(data)
	return true
}

// Clear empties s.
func (s *Segments) Clear() {
	clear(s.vectors[:s.used])
	s.count, s.bytes, s.used = 0, 0, 0
}

// Send sends all datagrams in one call, to the peer of a connected socket if to is nil.
func (s *Segments) Send(fd int, to *ReplyAddr) unix.Errno {
	return s.sendmsg(fd, to, s.vectors[:s.used], s.count > 1)
}

// SendEach sends each datagram by itself, after prefix unless that is nil. It returns how many bytes of
// the datagrams were sent, and how many datagrams were not.
func (s *Segments) SendEach(fd int, to *ReplyAddr, prefix []byte) (bytes, lost int) {
	var vectors [2]unix.Iovec
	first := 1
	if prefix != nil {
		first = 0
		vectors[0].Base = &prefix[0]
		vectors[0].SetLen(len(prefix))
	}
	for _, part := range s.vectors[:s.used] {
		for data := unsafe.Slice(part.Base, part.Len); ; {
			n := min(s.size, len(data))
			vectors[1].Base = unsafe.SliceData(data)
			vectors[1].SetLen(n)
			if s.sendmsg(fd, to, vectors[first:], false) == 0 {
				bytes += n
			} else {
				lost++
			}
			if data = data[n:]; len(data) == 0 {
				break
			}
		}
	}
	return bytes, lost
}

// sendmsg sends vectors as one datagram, or with split as several of s.size.
func (s *Segments) sendmsg(fd int, to *ReplyAddr, vectors []unix.Iovec, split bool) unix.Errno {
	used := 0
	s.header = unix.Msghdr{Iov: &vectors[0]}
	s.header.SetIovlen(len(vectors))
	if to != nil {
		s.header.Name, s.header.Namelen = (*byte)(unsafe.Pointer(&to.name)), to.nameLen
		used = copy(s.control[:], to.control[:to.controlLen])
	}
	if split {
		c := (*unix.Cmsghdr)(unsafe.Pointer(&s.control[used]))
		c.Level, c.Type = unix.IPPROTO_UDP, unix.UDP_SEGMENT
		c.SetLen(unix.CmsgLen(2))
		binary.NativeEndian.PutUint16(s.control[used+unix.SizeofCmsghdr:], uint16(s.size))
		used += unix.CmsgSpace(2)
	}
	if used > 0 {
		s.header.Control = &s.control[0]
		s.header.SetControllen(used)
	}
	_, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&s.header)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	if errno != 0 && errno != unix.EAGAIN && to == nil {
		// The error may be pending from an earlier datagram that was refused: try again.
		_, _, errno = unix.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&s.header)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	}
	s.header = unix.Msghdr{}
	return errno
}
