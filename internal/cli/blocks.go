package cli

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/term"
	"shaperd.dev/shaperd/shaper"
)

func blocksCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:         "blocks",
		Short:       "List blocked prefixes",
		Long:        `List the blocked source prefixes, and when each block ends.`,
		Example:     `  shaperd blocks`,
		Annotations: jsonAnnotations,
		Args:        noArgs(`: to block one, use "shaperd block PREFIX"`),
		RunE: func(cmd *cobra.Command, _ []string) error {
			blocks, err := e.client().Blocks(cmd.Context())
			if err != nil {
				return err
			}
			return e.showBlocks(blocks)
		},
	}
}

func (e env) showBlocks(blocks []api.Block) error {
	return e.show(blocks, func(p *term.Printer) {
		if len(blocks) == 0 {
			p.Line("No prefix is blocked.")
		}
		p.Table(blocksTable(blocks, time.Now()))
	})
}

func blocksTable(blocks []api.Block, now time.Time) *term.Table {
	t := term.NewTable("BLOCKED", "SINCE", "UNTIL")
	for _, b := range blocks {
		t.Add(b.Prefix, term.Clock(b.Since, now), strings.TrimPrefix(term.Until(b.Until, now, `"shaperd unblock"`), "until "))
	}
	return t
}

func blockCommand(e env) *cobra.Command {
	var forTime durationFlag
	cmd := &cobra.Command{
		Use:   "block PREFIX",
		Short: "Block a source prefix",
		Long: `Block all traffic from a source address or prefix: refuse new connections and
datagrams, and reset open connections. A block ends after --for, or with "shaperd
unblock". It survives reloads, and restarts when "run" has --state. A block is never
shortened: to do that, unblock the prefix first. Blocks are enforced in every mode, also
while the daemon observes and during a bypass.`,
		Example: `  shaperd block 192.0.2.0/24 --for 10m
  shaperd block 2001:db8::7`,
		Annotations: changeAnnotations,
		Args:        wantArgs("PREFIX"),
		RunE: func(cmd *cobra.Command, args []string) error {
			prefix, err := parsePrefix(args[0])
			if err != nil {
				return err
			}
			c := e.client()
			if err := c.Block(cmd.Context(), api.SetBlock{Prefix: prefix.String(), Duration: forTime.seconds()}); err != nil {
				return err
			}
			blocks, err := c.Blocks(cmd.Context())
			if err != nil {
				return e.afterChange(err)
			}
			return e.showBlocks(blocks)
		},
	}
	addForFlag(cmd, &forTime, `until "shaperd unblock"`)
	return cmd
}

func unblockCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:         "unblock PREFIX",
		Short:       "Remove a block",
		Long:        `Remove a block. PREFIX is one that "shaperd blocks" lists.`,
		Example:     `  shaperd unblock 192.0.2.0/24`,
		Annotations: changeAnnotations,
		Args:        wantArgs("PREFIX"),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			blocks, err := e.client().Blocks(cmd.Context())
			var prefixes []string
			for _, b := range blocks {
				prefixes = append(prefixes, b.Prefix)
			}
			if err != nil || len(args) > 0 {
				prefixes = nil
			}
			return prefixes, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			prefix, err := parsePrefix(args[0])
			if err != nil {
				return err
			}
			c := e.client()
			if err := c.Unblock(cmd.Context(), prefix.String()); err != nil {
				return err
			}
			blocks, err := c.Blocks(cmd.Context())
			if err != nil {
				return e.afterChange(err)
			}
			return e.showBlocks(blocks)
		},
	}
}

// parsePrefix parses a prefix of the command line.
func parsePrefix(s string) (netip.Prefix, error) {
	p, err := shaper.ParsePrefix(s)
	if err != nil {
		return p, usageError{fmt.Errorf("%q %w", s, err)}
	}
	return p, nil
}
