package cli

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/bpf"
)

func detachCommand(e env) *cobra.Command {
	var pins string
	cmd := &cobra.Command{
		Use:   "detach",
		Short: "Remove BPF programs and queues left on interfaces",
		Long: `Remove all programs, maps, queues and links that a daemon left on interfaces because it
was killed, or because of on_stop = "keep". Refused while a daemon runs: a running daemon
removes them itself when its configuration no longer has the attachment.`,
		Example: `  systemctl stop shaperd && shaperd detach`,
		Args:    noArgs(""),
		RunE: func(*cobra.Command, []string) error {
			if !filepath.IsAbs(pins) {
				return usageError{fmt.Errorf("--pin-path %q: must be an absolute path", pins)}
			}
			if !bpf.Pinned(pins) {
				fmt.Fprintf(e.stdout, "nothing is pinned in %s\n", pins)
				return nil
			}
			if bpf.Alive(pins) {
				return errors.New("a daemon is running: stop it first, or remove the attachments from its configuration and reload; " +
					"to kill one that does not stop, use \"systemctl kill --signal=KILL shaperd\"")
			}
			if err := bpf.Detach(pins); err != nil {
				return err
			}
			fmt.Fprintf(e.stdout, "detached everything pinned in %s\n", pins)
			return nil
		},
	}
	cmd.Flags().StringVar(&pins, "pin-path", "/sys/fs/bpf/shaperd", "`directory` in [daemon] pin_path")
	return cmd
}
