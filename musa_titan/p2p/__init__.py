"""Pipeline stages that talk through slots while they compute.

A tensor for a neighbouring stage is copied into a slot of registered memory; Mooncake's transfer engine (RDMA between
nodes, TCP elsewhere) moves the slot, a header announces it, and the neighbour copies it out. No collective library and
no compute unit takes part. Works without any framework::

    from musa_titan.p2p.config import P2PConfig
    from musa_titan.p2p.connect import open_session
    from musa_titan.p2p.layout import Direction

    session = open_session(members=[0, 1], rank=rank, store=store, config=P2PConfig(slot_bytes=1 << 20))
    session.isend(activation, Direction.FORWARD).wait()
    session.irecv(gradient, Direction.BACKWARD).wait()
    session.close()

Where to read: ``ring.py`` is the protocol, ``sending.py`` and ``receiving.py`` its two ends; ``layout.py`` what lies
where; ``connect.py`` and ``handshake.py`` how stages find each other; ``session.py`` the calls and the end;
``links.py`` how a dead peer is noticed; ``engine.py`` Mooncake; ``arena.py`` and ``staging.py`` memory and copies.
"""
