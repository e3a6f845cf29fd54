// Package conn is the proxy plane: it accepts TCP connections and UDP datagrams,
// forwards them to downstreams, and holds them to a policy on the way.
//
// One thread does it all, the loop: it owns the sockets, the gates at which
// connections wait for a slot, the lines in which bytes and datagrams wait for
// their departure, and the buckets in use, and so needs no lock. It sleeps in epoll
// until a socket is ready or something may leave, whichever is first. Only names of
// downstreams are looked up elsewhere.
package conn
