package lab

import "path/filepath"

// HAProxy returns the command of the HAProxy that scripts/install-peers unpacks into a directory:
// with its own C library, which is newer than the system's.
func HAProxy(peers string) []string {
	root := filepath.Join(peers, "haproxy")
	lib := filepath.Join(root, "usr/lib/x86_64-linux-gnu")
	return []string{filepath.Join(lib, "ld-linux-x86-64.so.2"), "--library-path", lib, filepath.Join(root, "usr/sbin/haproxy")}
}
