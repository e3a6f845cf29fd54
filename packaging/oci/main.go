// Command oci writes an image of the Open Container Initiative for several processors, as an archive that
// "skopeo copy oci-archive:" and "podman load" read. It needs no container engine, and the same
// binaries give the same bytes.
//
//	oci -o shaperd.tar -version 1.2.3 amd64=bin/amd64/shaperd armv7=bin/armv7/shaperd
package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"
)

// user is that of the container. It has no name outside.
const user = 65532

func main() {
	out := flag.String("o", "", "`file` to write")
	version := flag.String("version", "", "version of the image")
	flag.Parse()
	if err := run(*out, *version, os.Getenv("SOURCE_DATE_EPOCH"), flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "oci:", err)
		os.Exit(1)
	}
}

// run writes the image to out. Each program is "processor=file".
func run(out, version, epoch string, programs []string) error {
	seconds, err := strconv.ParseInt(epoch, 10, 64)
	if err != nil {
		return fmt.Errorf("SOURCE_DATE_EPOCH %q: must be seconds since 1970", epoch)
	}
	var b bytes.Buffer
	w := layoutWriter{tar: tar.NewWriter(&b), version: version, created: time.Unix(seconds, 0).UTC(), written: map[string]bool{}}
	for _, program := range programs {
		arch, file, ok := strings.Cut(program, "=")
		if !ok {
			return fmt.Errorf("%q: must be processor=file", program)
		}
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if err := w.addImage(arch, data); err != nil {
			return err
		}
	}
	if err := w.close(); err != nil {
		return err
	}
	return os.WriteFile(out, b.Bytes(), 0o644)
}

// layoutWriter writes an image layout (OCI image-spec, image-layout.md) as an archive.
type layoutWriter struct {
	tar     *tar.Writer
	version string
	created time.Time
	images  []descriptor
	written map[string]bool // files
}

// addImage adds the image of a processor, with its program.
func (w *layoutWriter) addImage(arch string, program []byte) error {
	layer, diffID, err := w.layer(program)
	if err != nil {
		return err
	}
	p := platform{OS: "linux", Architecture: arch}
	if arch == "armv7" {
		p.Architecture, p.Variant = "arm", "v7"
	}
	config, err := w.addJSON(typeConfig, imageConfig{
		Created: w.created, platform: p,
		Config: containerConfig{
			User:       fmt.Sprintf("%d:%[1]d", user),
			Entrypoint: []string{"/usr/bin/shaperd"},
			Cmd:        []string{"run", "--config", "/etc/shaperd/shaperd.toml", "--state", "/var/lib/shaperd/state"},
			Volumes:    map[string]struct{}{"/var/lib/shaperd": {}},
			StopSignal: "SIGTERM",
			Healthcheck: healthcheck{
				Test:     []string{"CMD", "/usr/bin/shaperd", "status"},
				Interval: 30 * time.Second, Timeout: 5 * time.Second, StartPeriod: 10 * time.Second, Retries: 3,
			},
			Labels: map[string]string{
				"org.opencontainers.image.title":    "shaperd",
				"org.opencontainers.image.version":  w.version,
				"org.opencontainers.image.licenses": "Apache-2.0",
				"org.opencontainers.image.url":      "https://shaperd.dev",
			},
		},
		RootFS:  rootFS{Type: "layers", DiffIDs: []string{diffID}},
		History: []history{{Created: w.created, CreatedBy: "shaperd"}},
	})
	if err != nil {
		return err
	}
	blob, err := w.addBlob(typeLayer, layer)
	if err != nil {
		return err
	}
	image, err := w.addJSON(typeManifest, manifest{SchemaVersion: 2, MediaType: typeManifest, Config: config, Layers: []descriptor{blob}})
	if err != nil {
		return err
	}
	image.Platform = &p
	w.images = append(w.images, image)
	return nil
}

// layer returns the compressed file system, and the digest of it before compression.
func (w *layoutWriter) layer(program []byte) (compressed []byte, diffID string, err error) {
	var b bytes.Buffer
	sum := sha256.New()
	zip := gzip.NewWriter(&b)
	t := tar.NewWriter(io.MultiWriter(zip, sum))
	passwd := fmt.Sprintf("root:x:0:0:root:/:/sbin/nologin\nshaperd:x:%d:%[1]d:shaperd:/:/sbin/nologin\n", user)
	group := fmt.Sprintf("root:x:0:\nshaperd:x:%d:\n", user)
	for _, f := range []struct {
		name  string
		mode  int64
		owner int
		data  []byte
	}{
		{"etc/", 0o755, 0, nil},
		{"etc/group", 0o644, 0, []byte(group)},
		{"etc/passwd", 0o644, 0, []byte(passwd)},
		{"etc/shaperd/", 0o755, 0, nil},
		{"etc/shaperd/conf.d/", 0o755, 0, nil},
		{"run/", 0o755, 0, nil},
		{"run/shaperd/", 0o755, user, nil},
		{"usr/", 0o755, 0, nil},
		{"usr/bin/", 0o755, 0, nil},
		{"usr/bin/shaperd", 0o755, 0, program},
		{"var/", 0o755, 0, nil},
		{"var/lib/", 0o755, 0, nil},
		{"var/lib/shaperd/", 0o700, user, nil},
	} {
		if err := writeFile(t, tar.Header{Name: f.name, Mode: f.mode, Uid: f.owner, Gid: f.owner, ModTime: w.created}, f.data); err != nil {
			return nil, "", err
		}
	}
	if err := t.Close(); err != nil {
		return nil, "", err
	}
	if err := zip.Close(); err != nil {
		return nil, "", err
	}
	return b.Bytes(), "sha256:" + hex.EncodeToString(sum.Sum(nil)), nil
}

func (w *layoutWriter) addJSON(mediaType string, content any) (descriptor, error) {
	data, err := json.Marshal(content)
	if err != nil {
		return descriptor{}, err
	}
	return w.addBlob(mediaType, data)
}

func (w *layoutWriter) addBlob(mediaType string, data []byte) (descriptor, error) {
	sum := sha256.Sum256(data)
	digest := hex.EncodeToString(sum[:])
	d := descriptor{MediaType: mediaType, Digest: "sha256:" + digest, Size: len(data)}
	return d, w.addFile("blobs/sha256/"+digest, data)
}

// addFile adds a file unless it is there.
func (w *layoutWriter) addFile(name string, data []byte) error {
	if w.written[name] {
		return nil
	}
	w.written[name] = true
	return writeFile(w.tar, tar.Header{Name: name, Mode: 0o644, ModTime: w.created}, data)
}

// close writes the index. Its images are one image for several processors.
func (w *layoutWriter) close() error {
	image, err := w.addJSON(typeIndex, index{SchemaVersion: 2, MediaType: typeIndex, Manifests: w.images})
	if err != nil {
		return err
	}
	image.Annotations = map[string]string{"org.opencontainers.image.ref.name": w.version}
	all, err := json.Marshal(index{SchemaVersion: 2, MediaType: typeIndex, Manifests: []descriptor{image}})
	if err != nil {
		return err
	}
	if err := w.addFile("index.json", all); err != nil {
		return err
	}
	if err := w.addFile("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)); err != nil {
		return err
	}
	return w.tar.Close()
}

// writeFile writes a file, or a directory if the name ends in a slash.
func writeFile(w *tar.Writer, h tar.Header, data []byte) error {
	h.Typeflag, h.Size, h.Format = tar.TypeReg, int64(len(data)), tar.FormatUSTAR
	if strings.HasSuffix(h.Name, "/") {
		h.Typeflag = tar.TypeDir
	}
	if err := w.WriteHeader(&h); err != nil {
		return err
	}
	_, err := w.Write(data)
	return err
}
