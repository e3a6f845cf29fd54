package redis

import (
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
)

// node is a node of a real cluster.
type node struct {
	*server
	admin func(...string) any
	id    string
}

// startCluster starts a cluster of two nodes, which have half of the slots each.
func startCluster(t *testing.T, binary string) (nodes []*node) {
	for i, slots := range [][]string{{"0", "8191"}, {"8192", "16383"}} {
		bus := testutil.FreeAddr(t, "tcp")
		_, busPort, _ := net.SplitHostPort(bus)
		sv := startServer(t, binary, "--cluster-enabled", "yes", "--cluster-port", busPort, "--cluster-node-timeout", "5000")
		n := &node{server: sv, admin: sv.admin(t)}
		n.id = n.admin("CLUSTER", "MYID").(string)
		n.admin("CLUSTER", "ADDSLOTSRANGE", slots[0], slots[1])
		n.admin("CLUSTER", "SET-CONFIG-EPOCH", strconv.Itoa(i+1))
		nodes = append(nodes, n)
		if i > 0 {
			host, port, _ := net.SplitHostPort(sv.address)
			nodes[0].admin("CLUSTER", "MEET", host, port, busPort)
		}
	}
	testutil.WaitFor(t, "the cluster", func() bool {
		for _, n := range nodes {
			info := n.admin("CLUSTER", "INFO")
			if infoField(info, "cluster_state") != "ok" || infoField(info, "cluster_known_nodes") != "2" {
				return false
			}
		}
		return true
	})
	return nodes
}

// TestCluster moves the slot of the keys from one node to the other while a host calls.
func TestCluster(t *testing.T) {
	onServers(t, func(t *testing.T, binary string) {
		nodes := startCluster(t, binary)
		s := openStore(t, Options{URL: "redis+cluster://" + nodes[0].address + "," + nodes[1].address})
		keys := s.target.keys()
		c := newCaller(t, s)
		before := c.mustCall()
		slot := nodes[0].admin("CLUSTER", "KEYSLOT", keys[0]).(int64)
		for _, key := range keys {
			if n := nodes[0].admin("CLUSTER", "KEYSLOT", key); n != slot {
				t.Errorf("%s is in slot %v, others in %v", key, n, slot)
			}
		}
		from, to := nodes[slot/8192], nodes[1-slot/8192]
		if s.conn.address != from.address {
			t.Fatalf("the call was processed at %s, and the keys are at %s", s.conn.address, from.address)
		}
		number := strconv.FormatInt(slot, 10)
		to.admin("CLUSTER", "SETSLOT", number, "IMPORTING", from.id)
		from.admin("CLUSTER", "SETSLOT", number, "MIGRATING", to.id)
		if _, err := c.call(); err == nil || !strings.Contains(err.Error(), "TRYAGAIN") {
			t.Errorf("while the keys move: %v", err)
		}
		host, port, _ := net.SplitHostPort(to.address)
		from.admin("MIGRATE", host, port, keys[0], "0", "10000")
		if _, err := c.call(); err == nil || !strings.Contains(err.Error(), "ASK") {
			t.Errorf("after the keys have moved: %v", err)
		}
		for _, n := range []*node{to, from} {
			n.admin("CLUSTER", "SETSLOT", number, "NODE", to.id)
		}
		after := c.mustCall()
		if s.conn.address != to.address || after.Epoch <= before.Epoch {
			t.Errorf("after the slot has moved: epoch %d after %d, at %s", after.Epoch, before.Epoch, s.conn.address)
		}
	})
}

// TestCluster_One has a single server, with an address that must be of a cluster.
func TestCluster_One(t *testing.T) {
	sv := startServer(t, binaries()[0])
	s := openStore(t, Options{URL: "redis+cluster://" + sv.address + "," + sv.address})
	if _, err := s.run(within(t, 20*time.Second), s.target.keys(), nil); err == nil || !strings.Contains(err.Error(), "not a node of a cluster") {
		t.Error(err)
	}
}
