"""The road for those who keep their own loop: what ``raydl.attach`` is made of, without Ray.

attached.py   what a user's loop holds: a replica that exchanges when it is due
door.py       one worker's way into generations and out of them
room.py       where workers meet: the center, and what everyone must agree on
meeting.py    who trains together: decided from who came, when, and who is still there
terms.py      what is checked before anything starts
claims.py     which models are attached
"""
