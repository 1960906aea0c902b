{{/* Deployment and Service of the target or the draft. side; port; flags: what its settings file cannot say. */}}
{{- define "specahead.modelService" -}}
{{- $values := index .root.Values .side -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .root.Release.Name }}-{{ .side }}
  labels: {{- include "specahead.labels" . | nindent 4 }}
spec:
  replicas: 1
  strategy:
    type: {{ $values.strategy }}
    {{- if eq $values.strategy "RollingUpdate" }}
    rollingUpdate: {maxSurge: 1, maxUnavailable: 0}
    {{- end }}
  selector:
    matchLabels: {{- include "specahead.selector" . | nindent 6 }}
  template:
    metadata:
      labels: {{- include "specahead.labels" . | nindent 8 }}
      annotations:
        checksum/settings: {{ include "specahead.settings" .root | sha256sum }}
    spec:
      {{- include "specahead.pod" . | nindent 6 }}
      terminationGracePeriodSeconds: 30
      {{- if eq .side "draft" }}
      affinity:  # a round crosses the network between the two
        podAffinity:
          preferredDuringSchedulingIgnoredDuringExecution:
            - weight: 100
              podAffinityTerm:
                topologyKey: kubernetes.io/hostname
                labelSelector:
                  matchLabels: {{- include "specahead.selector" (dict "root" .root "side" "target") | nindent 20 }}
      {{- end }}
      containers:
        - {{- include "specahead.container" . | nindent 10 }}
          args:
            - python
            - -m
            - {{ .side }}_service
            {{- range .flags }}
            - {{ . }}
            {{- end }}
          ports:
            - {name: grpc, containerPort: {{ .port }}}
          startupProbe:
            {{- include "specahead.grpcProbe" . | nindent 12 }}
            failureThreshold: {{ mul 6 $values.startMinutes }}
          readinessProbe:
            {{- include "specahead.grpcProbe" . | nindent 12 }}
          livenessProbe:
            {{- include "specahead.grpcProbe" . | nindent 12 }}
            failureThreshold: 3
          volumeMounts:
            {{- include "specahead.mounts" . | nindent 12 }}
            - {name: shm, mountPath: /dev/shm}
      volumes:
        {{- include "specahead.volumes" (merge (dict "secrets" (list "service-token")) .) | nindent 8 }}
        - name: cache
          {{- if .root.Values.modelCache.size }}
          persistentVolumeClaim: {claimName: {{ .root.Release.Name }}-{{ .side }}-models}
          {{- else }}
          emptyDir: {}
          {{- end }}
        - name: shm
          emptyDir: {medium: Memory, sizeLimit: {{ $values.sharedMemory }}}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ .root.Release.Name }}-{{ .side }}
  labels: {{- include "specahead.labels" . | nindent 4 }}
spec:
  selector: {{- include "specahead.selector" . | nindent 4 }}
  ports:
    - {name: grpc, port: {{ .port }}, targetPort: grpc, appProtocol: grpc}
{{- if .root.Values.modelCache.size }}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ .root.Release.Name }}-{{ .side }}-models
  labels: {{- include "specahead.labels" . | nindent 4 }}
spec:
  accessModes: [ReadWriteOnce]
  {{- with .root.Values.modelCache.storageClass }}
  storageClassName: {{ . }}
  {{- end }}
  resources: {requests: {storage: {{ .root.Values.modelCache.size }}}}
{{- end }}
{{- end }}
