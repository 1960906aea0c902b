# Makes a pod's certificate for Ray's TLS, signed by the cluster's own authority: Ray dials pods by their addresses.
set -euo pipefail
cd /etc/ray/tls
names="IP:$POD_IP,IP:127.0.0.1,DNS:localhost,DNS:specahead-head-svc"
names="$names,DNS:specahead-head-svc.$POD_NAMESPACE.svc,DNS:specahead-head-svc.$POD_NAMESPACE.svc.cluster.local"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj /CN=specahead-ray \
    -addext "subjectAltName=$names" -addext basicConstraints=critical,CA:FALSE \
    -CA "${RAY_CA:-/etc/ray/ca}/tls.crt" -CAkey "${RAY_CA:-/etc/ray/ca}/tls.key" -keyout tls.key -out tls.crt
cp "${RAY_CA:-/etc/ray/ca}/tls.crt" ca.crt
chmod 440 tls.key
