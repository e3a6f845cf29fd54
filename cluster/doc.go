// Package cluster shares limits between hosts: what all of them together let pass never exceeds a
// limit, whatever fails.
//
// A ledger gives each host parts of a bucket, under a lease. A host asks and confirms asynchronously;
// no packet and no connection waits for the ledger. Both are state machines that get the time as an
// argument and do no I/O: Ledger.Call is one call, and Host is what a host knows. A store, such as
// a Redis server or another daemon, runs the ledger.
package cluster
