{{- define "farside.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "farside.secret" -}}
{{ .Values.existingSecret | default .Release.Name }}
{{- end }}

{{- /* The addresses at which a server listens, and a client in its pod finds it. */ -}}
{{- define "farside.listen" -}}
{{ if .Values.rdma.enabled }}rdma://$(POD_IP):7400,{{ end }}tcp://$(POD_IP):7400
{{- end }}

{{- /* tmpfs counts as memory of the container, huge pages have a limit of their own. */ -}}
{{- define "farside.memory" -}}
{{ if .Values.hugePages }}{{ int64 .Values.overheadMiB }}{{ else }}{{ add .Values.memoryMiB .Values.overheadMiB }}{{ end }}Mi
{{- end }}
