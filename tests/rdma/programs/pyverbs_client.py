"""Two connected queue pairs through pyverbs: asks the device and the queue pair, sends messages.

Usage: pyverbs_client.py DEVICE GID_INDEX DEVICE GID_INDEX    (Python with Debian's python3-pyverbs)
Prints what it found as JSON; exits with 1 where a message was lost or changed.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

MESSAGES = 10
MESSAGE_BYTES = 4096
PORT = 1


@dataclass
class End:
    context: Context
    pd: PD
    cq: CQ
    qp: QP
    mr: MR
    gid: GID
    gid_index: int


def open_end(device: str, gid_index: int) -> End:
    context = Context(name=device)
    pd, cq = PD(context), CQ(context, 64)
    cap = QPCap(max_send_wr=32, max_recv_wr=32)
    qp = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap), QPAttr())
    mr = MR(pd, MESSAGE_BYTES, e.IBV_ACCESS_LOCAL_WRITE)
    return End(context, pd, cq, qp, mr, context.query_gid(PORT, gid_index), gid_index)


def connect(end: End, peer: End) -> None:
    attr = QPAttr(qp_state=e.IBV_QPS_INIT, port_num=PORT)
    attr.qp_access_flags = e.IBV_ACCESS_LOCAL_WRITE
    end.qp.modify(
        attr, e.IBV_QP_STATE | e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS
    )
    route = GlobalRoute(dgid=peer.gid, sgid_index=end.gid_index)
    route.hop_limit = 64
    attr = QPAttr(qp_state=e.IBV_QPS_RTR)
    attr.ah_attr = AHAttr(port_num=PORT, is_global=1, gr=route, dlid=0)
    attr.path_mtu, attr.dest_qp_num, attr.rq_psn = e.IBV_MTU_4096, peer.qp.qp_num, 0
    attr.max_dest_rd_atomic, attr.min_rnr_timer = 1, 12
    end.qp.modify(
        attr,
        e.IBV_QP_STATE
        | e.IBV_QP_AV
        | e.IBV_QP_PATH_MTU
        | e.IBV_QP_DEST_QPN
        | e.IBV_QP_RQ_PSN
        | e.IBV_QP_MAX_DEST_RD_ATOMIC
        | e.IBV_QP_MIN_RNR_TIMER,
    )
    attr = QPAttr(qp_state=e.IBV_QPS_RTS)
    attr.sq_psn, attr.timeout, attr.retry_cnt, attr.rnr_retry = 0, 17, 7, 7
    attr.max_rd_atomic = 1
    end.qp.modify(
        attr,
        e.IBV_QP_STATE
        | e.IBV_QP_SQ_PSN
        | e.IBV_QP_TIMEOUT
        | e.IBV_QP_RETRY_CNT
        | e.IBV_QP_RNR_RETRY
        | e.IBV_QP_MAX_QP_RD_ATOMIC,
    )


def completed(cq: CQ) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        count, completions = cq.poll()
        if count:
            return completions[0].status == e.IBV_WC_SUCCESS
    return False


def send(sender: End, receiver: End, number: int) -> bool:
    message = b"%08d" % number * (MESSAGE_BYTES // 8)
    sender.mr.write(message, MESSAGE_BYTES)
    taken = [SGE(receiver.mr.buf, MESSAGE_BYTES, receiver.mr.lkey)]
    given = [SGE(sender.mr.buf, MESSAGE_BYTES, sender.mr.lkey)]
    receiver.qp.post_recv(RecvWR(num_sge=1, sg=taken))
    sender.qp.post_send(SendWR(num_sge=1, sg=given))
    arrived = completed(receiver.cq) and completed(sender.cq)
    return arrived and receiver.mr.read(MESSAGE_BYTES, 0) == message


def asked(end: End) -> dict[str, int]:
    attr, _ = end.qp.query(e.IBV_QP_STATE | e.IBV_QP_AV | e.IBV_QP_SQ_PSN | e.IBV_QP_RQ_PSN)
    return {
        "qpn": end.qp.qp_num,
        "state": attr.qp_state,
        "sq_psn": attr.sq_psn,
        "rq_psn": attr.rq_psn,
        "traffic_class": attr.ah_attr.traffic_class,
        "flow_label": attr.ah_attr.flow_label,
    }


def main(device0: str, gid_index0: str, device1: str, gid_index1: str) -> int:
    a, b = open_end(device0, int(gid_index0)), open_end(device1, int(gid_index1))
    connect(a, b)
    connect(b, a)
    whole = sum(send(a, b, i) + send(b, a, i) for i in range(MESSAGES))
    device = a.context.query_device()
    found = {
        "device": {
            "max_qp": device.max_qp,
            "max_cqe": device.max_cqe,
            "ports": device.phys_port_cnt,
        },
        "queue_pairs": [asked(a), asked(b)],
        "messages": whole,
    }
    print(json.dumps(found))
    return 0 if whole == 2 * MESSAGES else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
