{{/* What the pods of all components share. Takes (root, values). */}}
{{- define "outrider.podSettings" -}}
{{- $root := index . 0 -}}
{{- $values := index . 1 -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with $root.Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}

{{/* What a container may do. */}}
{{- define "outrider.confined" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Labels and annotations of a pod; no version, so that a new chart alone restarts nothing. Takes (root, component). */}}
{{- define "outrider.podMetadata" -}}
{{- $values := index (index . 0).Values (index . 1) -}}
labels:
  {{- include "outrider.selector" . | nindent 2 }}
  app.kubernetes.io/part-of: outrider
  {{- with $values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $values.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Devices of a target's or draft's pod as "resource: count". Takes (root, component). */}}
{{- define "outrider.devices" -}}
{{- $values := index (index . 0).Values (index . 1) -}}
{{- $count := div (int $values.tensorParallel) (int ($values.nodes | default 1)) -}}
{{- if eq $values.accelerator "nvidia" -}}
{{ $values.gpuResource }}: {{ $count }}
{{- else if eq $values.accelerator "tpu" -}}
{{ $values.tpu.resource }}: {{ $count }}
{{- end -}}
{{- end }}

{{/* Requests and limits with the devices. Takes (root, component). */}}
{{- define "outrider.resources" -}}
{{- $values := index (index . 0).Values (index . 1) -}}
{{- $devices := include "outrider.devices" . | fromYaml -}}
{{- $resources := deepCopy $values.resources -}}
{{- if $devices -}}
{{- $resources = merge (dict "limits" $devices "requests" (deepCopy $devices)) $resources -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{/* Nodes that a target's or draft's pod goes to. Takes (root, component). */}}
{{- define "outrider.nodes" -}}
{{- $values := index (index . 0).Values (index . 1) -}}
{{- $selector := deepCopy $values.nodeSelector -}}
{{- $tolerations := $values.tolerations -}}
{{- if eq $values.accelerator "nvidia" -}}
{{- $tolerations = append $tolerations (dict "key" $values.gpuResource "operator" "Exists" "effect" "NoSchedule") -}}
{{- else if eq $values.accelerator "tpu" -}}
{{- $tolerations = append $tolerations (dict "key" $values.tpu.resource "operator" "Exists" "effect" "NoSchedule") -}}
{{- with $values.tpu.type -}}
{{- $_ := set $selector "cloud.google.com/gke-tpu-accelerator" . -}}
{{- end -}}
{{- with $values.tpu.topology -}}
{{- $_ := set $selector "cloud.google.com/gke-tpu-topology" . -}}
{{- end -}}
{{- end -}}
{{- with $selector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Environment of a target's or draft's container. Takes (root, component). */}}
{{- define "outrider.environment" -}}
{{- $root := index . 0 -}}
{{- $values := index $root.Values (index . 1) -}}
- {name: HF_HUB_OFFLINE, value: {{ ternary "1" "0" $root.Values.huggingface.offline | quote }}}
{{- with $root.Values.huggingface.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: {{ $root.Values.huggingface.key }}}
{{- end }}
{{- if eq $values.accelerator "nvidia" }}
# Compiled kernels; their usual folders lie outside the cache, on the read-only root.
- {name: TRITON_CACHE_DIR, value: /home/outrider/.cache/triton}
- {name: CUDA_CACHE_PATH, value: /home/outrider/.cache/cuda}
{{- end }}
{{- if and (eq (index . 1) "target") (include "outrider.multiNode" $root) }}
- {name: NCCL_SOCKET_IFNAME, value: {{ $values.networkInterface }}}
- {name: GLOO_SOCKET_IFNAME, value: {{ $values.networkInterface }}}
{{- end }}
{{- with $values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "outrider.mounts" -}}
{{- $root := index . 0 -}}
{{- $values := index $root.Values (index . 1) -}}
- {name: secrets, mountPath: /run/outrider, readOnly: true}
- {name: cache, mountPath: /home/outrider/.cache}
- {name: tmp, mountPath: /tmp}
{{- if $root.Values.model.existingClaim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if gt (int $values.tensorParallel) 1 }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if $root.Values.tls.services.enabled }}
- {name: tls, mountPath: /run/outrider-tls, readOnly: true}
{{- end }}
{{- end }}

{{/* Volumes of a target's or draft's pod. Takes (root, component). */}}
{{- define "outrider.volumes" -}}
{{- $root := index . 0 -}}
{{- $values := index $root.Values (index . 1) -}}
- name: secrets
  secret:
    secretName: {{ include "outrider.tokenSecret" $root }}
    defaultMode: 0440
    items: [{key: {{ $root.Values.auth.serviceToken.key }}, path: token}]
- {name: tmp, emptyDir: {}}
{{- if eq $values.cache.kind "emptyDir" }}
- name: cache
  emptyDir: {sizeLimit: {{ $values.cache.size }}}
{{- else if eq $values.cache.kind "claim" }}
- name: cache
  persistentVolumeClaim:
    claimName: {{ required (printf "%s.cache.kind claim needs %s.cache.existingClaim" (index . 1) (index . 1)) $values.cache.existingClaim }}
{{- end }}
{{- with $root.Values.model.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- if gt (int $values.tensorParallel) 1 }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ $values.shmSize }}}
{{- end }}
{{- if $root.Values.tls.services.enabled }}
- name: tls
  secret:
    secretName: {{ required "tls.services.enabled needs tls.services.existingSecret" $root.Values.tls.services.existingSecret }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{/*
Probes of a service. Its health is NOT_SERVING while it loads its model, and when its engine hangs although the port
answers. Takes (root, component, port).
*/}}
{{- define "outrider.probes" -}}
{{- $root := index . 0 -}}
{{- $values := index $root.Values (index . 1) -}}
{{- $port := index . 2 -}}
{{- if $root.Values.tls.services.enabled -}}
{{- /* The kubelet's own gRPC probes have no TLS. */ -}}
{{- $check := printf "exec: {command: [outrider, healthcheck, \"127.0.0.1:%v\", --timeout, \"10\", --service-ssl-ca-certs, /run/outrider-tls/ca.crt, --service-ssl-certfile, /run/outrider-tls/tls.crt, --service-ssl-keyfile, /run/outrider-tls/tls.key, --service-ssl-server-name, %s]}" $port $root.Values.tls.services.serverName -}}
startupProbe:
  {{ $check }}
  periodSeconds: 15
  timeoutSeconds: 15
  failureThreshold: {{ div (add (int $values.startup.seconds) 14) 15 }}
livenessProbe:
  {{ $check }}
  periodSeconds: 30
  timeoutSeconds: 15
  failureThreshold: 2
readinessProbe:
  {{ $check }}
  periodSeconds: 15
  timeoutSeconds: 15
  failureThreshold: 2
{{- else -}}
startupProbe:
  grpc: {port: {{ $port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add (int $values.startup.seconds) 4) 5 }}
livenessProbe:
  grpc: {port: {{ $port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  grpc: {port: {{ $port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
{{- end }}
{{- end }}

{{/* Flags of every service for its token and certificate. */}}
{{- define "outrider.serviceSecurity" -}}
- --service-token-file
- /run/outrider/token
{{- if .Values.tls.services.enabled }}
- --ssl-certfile
- /run/outrider-tls/tls.crt
- --ssl-keyfile
- /run/outrider-tls/tls.key
- --ssl-ca-certs
- /run/outrider-tls/ca.crt
{{- end }}
{{- end }}

{{/* A Deployment's or StatefulSet's fields around its pods. Takes (root, component). */}}
{{- define "outrider.replicas" -}}
{{- $root := index . 0 -}}
{{- $values := index $root.Values (index . 1) -}}
{{- $kind := (include "outrider.workload" . | fromYaml).kind -}}
selector:
  matchLabels: {{- include "outrider.selector" . | nindent 4 }}
{{- if not $values.autoscaling.enabled }}
replicas: {{ $values.replicas }}
{{- end }}
{{- if eq $kind "StatefulSet" }}
serviceName: {{ include "outrider.fullname" $root }}-{{ index . 1 }}
podManagementPolicy: Parallel
volumeClaimTemplates:
  - metadata:
      name: cache
    spec:
      accessModes: [ReadWriteOnce]
      {{- with $values.cache.storageClass }}
      storageClassName: {{ . }}
      {{- end }}
      resources: {requests: {storage: {{ $values.cache.size }}}}
{{- else }}
strategy: {{- toYaml $values.strategy | nindent 2 }}
{{- end }}
{{- end }}
