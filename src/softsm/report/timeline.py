"""Writes a recording as a trace for ui.perfetto.dev, with one process per CTA and one track per warp and engine.

Arrows go from an arrival to the wait it ends, and from an instruction to the operation it starts. Counters show the
columns of tensor memory in use and the bytes copied. Cycles of an emulated run are written as nanoseconds
(report/recording.py); the times of a prediction are nanoseconds (report/predicted.py).
"""

from __future__ import annotations

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from softsm.report.recording import Recorder, Track

SEQUENCE = 1
ORDER = {"warp": 0, "TMA": 100, "copies": 300, "tensor core": 500, "other": 700}


class Writer:
    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.trace = pb.Trace()
        self.ids: dict[object, int] = {}

    def packet(self, time: int | None = None):
        packet = self.trace.packet.add()
        packet.trusted_packet_sequence_id = SEQUENCE
        if time is not None:
            packet.timestamp = time
        return packet

    def process(self, launch: int, cta: int) -> int:
        key = (launch, cta)
        if key not in self.ids:
            self.ids[key] = len(self.ids) + 1
            d = self.packet().track_descriptor
            d.uuid = self.ids[key]
            d.process.pid = self.ids[key]
            run = self.recorder.launches[launch]
            d.process.process_name = f"{launch} {run.kernel} CTA {run.ctas[cta]}"
        return self.ids[key]

    def track(self, track: Track) -> int:
        if track not in self.ids:
            parent = self.process(track.launch, track.cta)
            self.ids[track] = len(self.ids) + 1
            d = self.packet().track_descriptor
            d.uuid = self.ids[track]
            d.thread.pid = parent
            d.thread.tid = 1000 * parent + ORDER[track.kind] + track.number
            d.thread.thread_name = self.recorder.track_name(track)
        return self.ids[track]

    def counter(self, launch: int, cta: int, name: str, unit: str) -> int:
        key = (launch, cta, name)
        if key not in self.ids:
            parent = self.process(launch, cta)
            self.ids[key] = len(self.ids) + 1
            d = self.packet().track_descriptor
            d.uuid, d.parent_uuid, d.name = self.ids[key], parent, name
            d.counter.unit_name = unit
        return self.ids[key]

    def write(self) -> bytes:
        sources: dict[int, list[int]] = {}
        targets: dict[int, list[int]] = {}
        for number, (a, b) in enumerate(self.recorder.flows, 1):
            sources.setdefault(a, []).append(number)
            targets.setdefault(b, []).append(number)
        packets = []  # (time, order, what): a slice ends before the next one begins
        for i, s in enumerate(self.recorder.slices):
            self.track(s.track)
            packets.append((s.start, 1, i, True))
            packets.append((max(s.end, s.start + 1), 0, i, False))
        for time, _, i, begins in sorted(packets):
            s = self.recorder.slices[i]
            event = self.packet(time).track_event
            event.track_uuid = self.ids[s.track]
            if not begins:
                event.type = pb.TrackEvent.TYPE_SLICE_END
                # An arrow leaves at the end of the operation and arrives at the end of the wait.
                event.flow_ids.extend(sources.get(i, ()) if s.kind in ("copy", "mma") else ())
                event.terminating_flow_ids.extend(targets.get(i, ()) if s.kind == "wait" else ())
                continue
            event.type = pb.TrackEvent.TYPE_SLICE_BEGIN
            event.name = s.name
            event.categories.append(s.kind)
            event.flow_ids.extend(() if s.kind in ("copy", "mma") else sources.get(i, ()))
            event.terminating_flow_ids.extend(() if s.kind == "wait" else targets.get(i, ()))
            for name, value in s.details.items():
                note = event.debug_annotations.add()
                note.name = name
                if isinstance(value, int):
                    note.int_value = value
                else:
                    note.string_value = str(value)
        self.counters()
        return self.trace.SerializeToString()

    def counters(self) -> None:
        changes: dict[tuple, list[tuple[int, int]]] = {}
        for launch, _, cta, start, end, _, columns in self.recorder.allocations:
            if cta < len(self.recorder.launches[launch].ctas):
                changes.setdefault((launch, cta, "TMEM columns allocated", "columns"), []).extend(
                    [(start, columns), (end, -columns)]
                )
        for s in self.recorder.slices:
            if s.kind == "copy" and "bytes" in s.details:
                key = (s.track.launch, s.track.cta, "bytes in flight", "bytes")
                changes.setdefault(key, []).extend([(s.start, s.details["bytes"]), (s.end, -s.details["bytes"])])
        for track, clock in self.recorder.clocks.items():
            if (track.launch, track.cta) in self.ids:
                key = (track.launch, track.cta, "instructions of exited warps", "instructions")
                changes.setdefault(key, []).append((clock.time, clock.instructions))
        for key, steps in changes.items():
            uuid, value = self.counter(*key), 0
            for time, step in sorted(steps):
                value += step
                event = self.packet(time).track_event
                event.type, event.track_uuid, event.counter_value = pb.TrackEvent.TYPE_COUNTER, uuid, value


def perfetto_trace(recorder: Recorder) -> bytes:
    return Writer(recorder).write()
