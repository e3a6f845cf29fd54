//go:build race

package cluster

func init() { *searchDepth = 3 }
