// Package peer lets daemons serve the ledger of shared limits to each other, where there is no Redis.
//
// A [Server] keeps the ledger in memory, one for each group of hosts, and processes calls of this process
// and of others. A server that starts again knows nothing, which begins a new epoch. A [Client] calls one
// of several servers. Each has a ledger of its own, and hosts that call different ones share nothing with
// each other: so with more than one server, hosts must be [cluster.Params.Strict], see [NeedsStrict].
//
// # Transport
//
// A call is a POST with JSON over HTTP/1.1 and mutual TLS 1.3, on a connection that stays open for some
// minutes. It is sent once. Both sides refuse fields that they do not know, as they cannot do what these
// ask: hosts with another version of the protocol than their server are alone.
//
// # Authentication
//
// Both sides have a certificate that is signed by one of the authorities in [Files.CA], which sign for
// nobody else: who has such a certificate belongs to the group. That of a server must be for the address
// or name by which clients call it. That of a client must name its host: the name of the host must be
// a DNS name of the certificate, or the first label of one, in lower case. So the certificate for
// "gw1.example.net" is that of hosts "gw1" and "gw1.example.net", which are two to the ledger, and no host calls
// for another one. A wildcard names no host.
//
// The files are read at each handshake. Renewed ones are in use within ten minutes, as no
// connection lasts longer; an authority that was removed from the file is trusted no longer than that.
//
// # Trust
//
// A host that the authorities vouch for can do harm: it can want all of each limit, can make the ledger
// forget everything as often as it likes, and can ignore what it is given. But it cannot call for
// another host, and its calls cannot crash a server or fill its memory, see [cluster.Request.Validate].
// Others than hosts can occupy some connections for some seconds, and the time for handshakes.
package peer
