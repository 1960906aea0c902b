{{/* Labels of every object, and those by which the pods of one service are found. */}}
{{- define "specahead.labels" -}}
app.kubernetes.io/name: specahead
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
{{- with .side }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- define "specahead.selector" -}}
app.kubernetes.io/name: specahead
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .side }}
{{- end }}

{{- define "specahead.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion .Values.image.variant) }}
{{- end }}

{{/* What a pod may do, and what it waits for. */}}
{{- define "specahead.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with (index .root.Values .side).nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with (index .root.Values .side).tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What each container has, whatever it runs. */}}
{{- define "specahead.container" -}}
name: specahead
image: {{ include "specahead.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
resources: {{- toYaml (index .root.Values .side).resources | nindent 2 }}
envFrom:
  - configMapRef: {name: {{ .root.Release.Name }}-settings}
{{- if or .root.Values.secrets.huggingFace .environment }}
env:
  {{- with .root.Values.secrets.huggingFace }}
  - name: HF_TOKEN
    valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
  {{- end }}
  {{- range $name, $value := .environment }}
  - {name: {{ $name }}, value: {{ $value | quote }}}
  {{- end }}
{{- end }}
{{- end }}

{{- define "specahead.mounts" -}}
- {name: access, mountPath: /etc/specahead/access, readOnly: true}
- {name: cache, mountPath: /cache}
- {name: tmp, mountPath: /tmp}
{{- if .root.Values.planConfigMap }}
- {name: plan, mountPath: /etc/specahead/plan, readOnly: true}
{{- end }}
{{- if .root.Values.tls.services }}
- {name: service-tls, mountPath: /etc/specahead/service-tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "specahead.volumes" -}}
- name: access
  secret:
    secretName: {{ .root.Values.secrets.access }}
    defaultMode: 0440
    items: {{- range .secrets }}
      - {key: {{ . }}, path: {{ . }}}
    {{- end }}
- name: tmp
  emptyDir: {}
{{- with .root.Values.planConfigMap }}
- name: plan
  configMap: {name: {{ . }}}
{{- end }}
{{- with .root.Values.tls.services }}
- name: service-tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{/* A probe of a model service. Kubernetes' own speaks no TLS. */}}
{{- define "specahead.grpcProbe" -}}
{{- if .root.Values.tls.services -}}
exec:
  command:
    - specahead
    - health
    - 127.0.0.1:{{ .port }}
    - --tls-ca=/etc/specahead/service-tls/ca.crt
    - --tls-cert=/etc/specahead/service-tls/tls.crt
    - --tls-key=/etc/specahead/service-tls/tls.key
    - --tls-name={{ .root.Release.Name }}-{{ .side }}
{{- else -}}
grpc: {port: {{ .port }}}
{{- end }}
periodSeconds: 10
timeoutSeconds: 5
{{- end }}
