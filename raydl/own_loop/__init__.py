"""Keep your own training loop: what ``raydl.attach`` is made of, without Ray.

attached.py           what a user's loop holds: a replica that exchanges when it is due
rendezvous_client.py  enters generations and leaves them, for one worker
rendezvous_server.py  the rendezvous behind a lock, with the center to start from
rendezvous.py         decides who trains together, from who came when and who is still there
terms.py              what is checked before anything starts
claims.py             which models are attached
"""
