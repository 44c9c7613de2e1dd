{{- define "outrider.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* Short enough for "-service-token", and for the suffixes of LeaderWorkerSet and StatefulSet. */}}
{{- define "outrider.fullname" -}}
{{- $name := include "outrider.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* Labels by which selectors find the pods of a component. Takes (root, component). */}}
{{- define "outrider.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "outrider.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Labels of an object. Takes (root, component). */}}
{{- define "outrider.labels" -}}
{{- $root := index . 0 -}}
{{ include "outrider.selector" . }}
app.kubernetes.io/part-of: outrider
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Name and labels of an object of a component. Takes (root, component). */}}
{{- define "outrider.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "outrider.fullname" $root }}-{{ index . 1 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "outrider.labels" . | nindent 2 }}
{{- end }}

{{/*
Name of the headless Service by which gateways find a service. Takes (root, component). A LeaderWorkerSet takes a Service
of its own name for that of its ranks, which must find one another before any of them is ready.
*/}}
{{- define "outrider.discovery" -}}
{{- $root := index . 0 -}}
{{ include "outrider.fullname" $root }}-{{ index . 1 }}
{{- if and (eq (index . 1) "target") (include "outrider.multiNode" $root) -}}-leaders{{- end -}}
{{- end }}

{{/* Takes (root, image). */}}
{{- define "outrider.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- $repository := $image.repository -}}
{{- with $root.Values.image.registry -}}{{- $repository = printf "%s/%s" . $repository -}}{{- end -}}
{{ $repository }}:{{ $image.tag | default $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end }}

{{/* Names of the Secrets: of the user, or of the chart. */}}
{{- define "outrider.tokenSecret" -}}
{{- .Values.auth.serviceToken.existingSecret | default (printf "%s-service-token" (include "outrider.fullname" .)) -}}
{{- end }}
{{- define "outrider.keysSecret" -}}
{{- printf "%s-keys" (include "outrider.fullname" .) -}}
{{- end }}

{{/* "true" for a target that is divided among several nodes. */}}
{{- define "outrider.multiNode" -}}
{{- if gt (int .Values.target.nodes) 1 }}true{{ end -}}
{{- end }}

{{/* Kind and apiVersion of a service's workload. Takes (root, component). */}}
{{- define "outrider.workload" -}}
{{- $root := index . 0 -}}
{{- if and (eq (index . 1) "target") (include "outrider.multiNode" $root) -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else if eq (index $root.Values (index . 1)).cache.kind "perReplica" -}}
apiVersion: apps/v1
kind: StatefulSet
{{- else -}}
apiVersion: apps/v1
kind: Deployment
{{- end -}}
{{- end }}
