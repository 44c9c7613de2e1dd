"""OTLP collectors for tests, over gRPC and HTTP."""

import threading
from concurrent import futures
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.support.gateway.services import until


class Spans:
    """Spans that a collector received. spans: (service, span), in order of arrival."""

    def __init__(self):
        self.spans = []

    def take(self, request):
        for resource in request.resource_spans:
            service = plain(resource.resource.attributes)["service.name"]
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]

    def trace(self, trace_id):
        """Spans of a trace, by service and name."""
        return {(service, s.name): s for service, s in self.spans if s.trace_id.hex() == trace_id}

    def whole(self, count=5, **wanted):
        """Spans of the trace with this number of spans whose request has these attributes."""

        def found():
            for _, span in list(self.spans):
                has = plain(span.attributes)
                trace = self.trace(span.trace_id.hex())
                fits = all(has.get(name.replace("__", ".")) == value for name, value in wanted.items())
                if fits and len(trace) >= count:
                    return trace
            return None

        return until(found, seconds=60)


class Collector(Spans, trace_service_pb2_grpc.TraceServiceServicer):
    """The trace service of an OTLP collector, over gRPC."""

    def __init__(self):
        super().__init__()
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self.server)
        self.url = f"http://127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def Export(self, request, context):
        self.take(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def stop(self):
        self.server.stop(0).wait()


class HttpCollector(Spans):
    """The same over HTTP. asked: path and headers of each delivery, header names in lower case."""

    def __init__(self):
        super().__init__()
        self.asked = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, collector, *connection):
        self.collector = collector
        super().__init__(*connection)

    def do_POST(self):
        sent = self.rfile.read(int(self.headers["content-length"]))
        self.collector.take(trace_service_pb2.ExportTraceServiceRequest.FromString(sent))
        self.collector.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        answer = trace_service_pb2.ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def plain(attributes):
    """Attributes as Python has them."""

    def value(any_value):
        kind = any_value.WhichOneof("value")
        if kind == "array_value":
            return [value(item) for item in any_value.array_value.values]
        return getattr(any_value, kind)

    return {attribute.key: value(attribute.value) for attribute in attributes}
