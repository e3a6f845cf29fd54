//go:build race

package cluster

func init() { *searchDepth, *walks = 3, 100 }
