"""Recording by roles: one rank of each kind runs, the others take part by symmetry.

    layout        families of process groups, and the plan: which ranks run, and whom they stand for
    stating       the plan as the user states it (--roles)
    views         what each member of a group contributes when some of them are absent
    coordinating  the coordinator that completes operations of which some members are absent
    keys          the rendezvous store, in which absent ranks set no keys
    seam          the rank's side, and process groups that cost nothing where the rank is no member
    verifying     compares sampled ranks with the ranks that stand for them
    writing       the trace of all ranks from that of those that ran
    recording     one recording by roles, from start to file

It imports nothing of torch outside of seam, which runs inside a rank.
"""
