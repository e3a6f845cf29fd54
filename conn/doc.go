// Package conn is the proxy plane: it accepts TCP connections and UDP datagrams,
// forwards them to downstreams, and holds them to a policy on the way.
//
// Slow work, accepting, waiting for a slot, resolving and dialling, is done in
// goroutines. Everything that moves bytes is done by one thread, the loop, which
// owns the sockets, the waiting lines and the buckets in use, and so needs no
// lock: it sleeps in epoll until a socket is ready or a unit may leave, whichever
// is first.
package conn
