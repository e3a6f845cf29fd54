package attach

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Constants of nf_tables besides those in package unix (include/uapi/linux/netfilter.h,
// include/uapi/linux/netfilter/nf_tables.h).
const (
	netdevIngress = 0 // NF_NETDEV_INGRESS
	inetIngress   = 5 // NF_INET_INGRESS

	chainName     = 3 // NFTA_CHAIN_NAME
	hookDev       = 3 // NFTA_HOOK_DEV
	hookDevs      = 4 // NFTA_HOOK_DEVS
	flowtableName = 2 // NFTA_FLOWTABLE_NAME
	flowtableHook = 3 // NFTA_FLOWTABLE_HOOK
	flowtableDevs = 3 // NFTA_FLOWTABLE_HOOK_DEVS
)

// ingressChains lists the base chains and flowtables of nf_tables at the ingress of an
// interface.
func ingressChains(ifname string) (all []string, err error) {
	for _, family := range []struct {
		number  byte
		ingress uint32
	}{{unix.NFPROTO_NETDEV, netdevIngress}, {unix.NFPROTO_INET, inetIngress}} {
		chains, err := nfTables(unix.NFT_MSG_GETCHAIN, family.number)
		if err != nil {
			return nil, err
		}
		for _, c := range chains {
			hook := nested(c[unix.NFTA_CHAIN_HOOK])
			number := hook[unix.NFTA_HOOK_HOOKNUM]
			if len(number) == 4 && binary.BigEndian.Uint32(number) == family.ingress &&
				(text(hook[hookDev]) == ifname || slices.Contains(texts(hook[hookDevs]), ifname)) {
				all = append(all, "the chain "+text(c[chainName])+" of nf_tables")
			}
		}
	}
	tables, err := nfTables(unix.NFT_MSG_GETFLOWTABLE, unix.NFPROTO_UNSPEC)
	for _, f := range tables {
		if slices.Contains(texts(nested(f[flowtableHook])[flowtableDevs]), ifname) {
			all = append(all, "the flowtable "+text(f[flowtableName])+" of nf_tables")
		}
	}
	return all, err
}

// nfTables returns the attributes of all nf_tables objects of a kind and family.
func nfTables(kind int, family byte) (all []map[uint16][]byte, err error) {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|kind, unix.NLM_F_DUMP)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: unix.NFNETLINK_V0})
	messages, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	switch {
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
		return nil, nil // a kernel without nf_tables
	case err != nil:
		return nil, fmt.Errorf("list nf_tables: %w", err)
	}
	for _, m := range messages {
		all = append(all, nested(m[nl.SizeofNfgenmsg:]))
	}
	return all, nil
}

// nested returns nested attributes by type.
func nested(b []byte) map[uint16][]byte {
	all := map[uint16][]byte{}
	attrs, _ := nl.ParseRouteAttr(b) // the attributes before any malformed one
	for _, a := range attrs {
		all[a.Attr.Type&nl.NLA_TYPE_MASK] = a.Value
	}
	return all
}

func text(b []byte) string { return string(bytes.TrimRight(b, "\x00")) }

// texts returns the values of a list of attributes.
func texts(b []byte) (all []string) {
	attrs, _ := nl.ParseRouteAttr(b)
	for _, a := range attrs {
		all = append(all, text(a.Value))
	}
	return all
}
