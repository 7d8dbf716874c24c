"""The consumers of the forward kernels: the main loop of a warpgroup that folds 64 rows of each query tile.

Tile by tile:   issue S'  |  issue O += P V  |  wait for S', release K  |  mods, mask, softmax  |  wait for O, release V

The exponentials of one tile run beside the products of the one before, and, as the warpgroups alternate (by themselves, or by
ping-pong scheduling), beside the others' products.  e4m3 may add up outside of wgmma (config.OUTSIDE): P V of each tile but the
last is then issued alone, and added to O when it has been waited for.

KV tiles go from left to right, in one loop: those that the diagonal cuts come last.  Tiles of which a consumer's rows see
nothing are passed over.
"""

from .chunks import first_chunk, first_total, keep_chunk, merge_chunk, step_of_chunk
from .gluon import gl, jit, opaque, schedule_fence, wgmma_wait
from .products import add_output, issue_output, issue_scores, rescale_output, wait_output, zero_output
from .scheduler import IDLE


@jit
def pass_over(CID: gl.constexpr, k, v, turns, t, tiles):
    """Release KV tiles from number t on, unread -> the number that follows."""
    for _ in range(tiles):
        stage = k.stage(t)
        turns.wait(CID)
        turns.pass_on(CID)
        k.wait(stage)
        k.release(stage)
        v.wait(stage)
        v.release(stage)
        t += 1
    return t


@jit
def consume(CID: gl.constexpr, config, scheduler, q, k, v, mask, mods, softmax, epilogue, turns):
    """Consumer number CID: rows OWNER * 64 on of each query tile of this program, and columns FIRST on of V."""
    LAZY: gl.constexpr = softmax.LAZY
    VOTE: gl.constexpr = softmax.VOTE
    OUTSIDE: gl.constexpr = config.OUTSIDE
    OWN: gl.constexpr = mask.OWN and not (mods.bias.ROWS or mods.mask.ROWS)  # their tiles have rings of their own
    REST: gl.constexpr = config.PROBS_REST
    CHUNK: gl.constexpr = config.CHUNK
    SPLIT: gl.constexpr = v.SLOTS // k.SLOTS  # consumers that fold the same rows, each with columns of V of its own
    CONSUMERS: gl.constexpr = config.CONSUMERS // SPLIT  # that have rows of their own
    OWNER: gl.constexpr = CID // SPLIT
    FIRST: gl.constexpr = CID % SPLIT * config.DIM_V
    inner = mods.inner_scale()
    scale_of_all = mods.scale_of_softmax()
    nothing = gl.zeros([64, config.KEYS], gl.float32, config.SCORES)  # never read
    no_output = zero_output(config)  # nor this
    zero = scheduler.problem.seq_q >> 31  # for e4m3, see `Softmax.operand`
    i = 0  # times that Q's barriers were passed: query tiles, and IDLE
    t = 0  # KV tiles that were folded
    turns.begin(CID)
    q.wait(q.query_stage(OWNER, i, CONSUMERS))  # Q's `full` barrier covers the mailbox, too
    item = scheduler.item(i)
    while item >= 0:
        q_stage = q.query_stage(OWNER, i, CONSUMERS)
        q_tile = q.parts(q_stage)
        work = scheduler.work(item, i)
        walk = mask.walk(work)
        row = work.block * (CONSUMERS * 64) + OWNER * 64
        if OWN:
            begin, end = mask.own(work, row, walk)
            t = pass_over(CID, k, v, turns, t, begin)
        else:
            begin, end = 0, walk.count
        entry = walk.entry(begin)
        key = walk.tile(entry) * config.KEYS
        scale = mods.scale_of_tile(scale_of_all, work)
        slope = mods.slope(nothing, work)
        acc = zero_output(config)
        if CHUNK:
            m, l = first_chunk(softmax)
            total = first_total(softmax, CID, acc, work.head)
        else:
            m, l = softmax.begin(nothing, work.head)
        ahead = k.stage(t)
        stage = v.share(ahead, CID, SPLIT)
        k.wait(ahead)
        turns.wait(CID)
        s = issue_scores(q_tile, k, ahead, nothing)
        turns.pass_on(CID)
        s = wgmma_wait(0, deps=(s,))
        k.release(ahead)
        s = mods.apply(s, inner, slope, t, work, row, key, walk.partial(entry), CID, True)
        s = mask.apply(s, work, row, key)
        if CHUNK:
            p, m, l, alpha = step_of_chunk(softmax, s, m, l, scale)
        else:
            p, m, l, alpha = softmax.step(s, m, l, scale)
        if OUTSIDE:
            before = alpha  # the factor of O when the product of these probabilities is added
        if LAZY:
            # m takes over m_next in the loop, which `check` there makes a value of its own (see gluon.py)
            checked, m_next, worst = scheduler.overflow.is_checked(i), m, gl.zeros_like(m)
        for j in range(begin + 1, end):
            t += 1
            entry = walk.entry(j)
            key = walk.tile(entry) * config.KEYS
            ahead = k.stage(t)
            k.wait(ahead)
            if (
                turns.ON or VOTE
            ) and not OUTSIDE:  # before the turn; VOTE branches, which would wait for a product in flight
                acc = rescale_output(acc, alpha, VOTE)
            probs = softmax.operand(p, zero)  # before a product is in flight, which would be waited for
            turns.wait(CID)
            q_tile = q.parts(q.query_stage(OWNER, i, CONSUMERS))  # again, as it may be wide: see `Pipeline._hidden`
            s_flying = issue_scores(q_tile, k, ahead, nothing)
            if not (turns.ON or VOTE or OUTSIDE):
                acc = rescale_output(acc, alpha, False)
            v.wait(stage)
            if OUTSIDE:
                o_flying = issue_output(probs, v, stage, no_output, REST, False)
            else:
                o_flying = issue_output(probs, v, stage, acc, REST)
            turns.pass_on(CID)
            s = wgmma_wait(len(acc), deps=(s_flying,))
            if not config.LATE:
                k.release(ahead)
            s = mods.apply(s, inner, slope, t, work, row, key, walk.partial(entry), CID)
            if LAZY:
                if checked | mask.cuts(work, row, key, True):
                    s = mask.cut(s, work, row, key)
                    m_next = softmax.check(s, m_next, scale)
                p_next, m, l, alpha, part = softmax.step_lazily(s, m, m_next, l, scale)
            elif CHUNK:
                s = mask.apply(s, work, row, key)
                anew = key % (CHUNK * config.KEYS) == 0
                m_chunk, l_chunk = m, l
                m = gl.where(anew, float("-inf"), m)
                l = gl.where(anew, 0.0, l)
                p_next, m, l, alpha = step_of_chunk(softmax, s, m, l, scale)
            else:
                s = mask.apply(s, work, row, key)
                p_next, m, l, alpha = softmax.step(s, m, l, scale)
            if config.FENCE:
                l = schedule_fence(l)
            if OUTSIDE:
                acc = add_output(rescale_output(acc, before, False), wait_output(o_flying))
                before = alpha
            else:
                acc = wait_output(o_flying)
            if LAZY:
                m_next, worst = softmax.update(part, m, worst)
            if CHUNK:
                if anew:
                    total = keep_chunk(softmax, CID, total, acc, m_chunk, l_chunk)
                    acc = zero_output(config)
            if config.LATE:
                k.release(ahead)
            v.release(stage)
            p = p_next
            stage = v.share(ahead, CID, SPLIT)
        # every product of this query tile with Q has been waited for
        q.release(q_stage)
        acc = rescale_output(acc, alpha, False)
        v.wait(stage)
        if config.VARLEN:  # the next sequence's values lie behind the last key, and 0 * NaN is NaN
            live = work.seq_k - (walk.first + end - 1) * config.KEYS
            if live < config.KEYS:
                v.clear_tail(stage, live)
        acc = wait_output(issue_output(softmax.operand(p, zero), v, stage, acc, REST))
        v.release(stage)
        t += 1
        if OWN:
            t = pass_over(CID, k, v, turns, t, walk.count - end)
        if config.RELOCATE:
            work = scheduler.work(opaque(item), i)
            row = work.block * (CONSUMERS * 64) + OWNER * 64
        if CHUNK:
            acc, m, l = merge_chunk(softmax, CID, total, acc, m, l)
            epilogue.store_total(acc, m, l, work, row)
        elif mods.scales is None:
            epilogue.store(acc, m, l, work, row, FIRST)
        else:
            epilogue.store(acc, m, l, work, row, FIRST, mods.scales.of_values(work))
        if LAZY:
            scheduler.overflow.write(i, CID, softmax.overflowed(worst, item))
        i += 1
        q.wait(q.query_stage(OWNER, i, CONSUMERS))
        item = scheduler.item(i)
        if LAZY:
            for _ in gl.static_range(scheduler.overflow.TILES - 1):
                if item == IDLE:
                    q.release(q.query_stage(OWNER, i, CONSUMERS))
                    i += 1
                    q.wait(q.query_stage(OWNER, i, CONSUMERS))
                    item = scheduler.item(i)
    turns.end(CID)
