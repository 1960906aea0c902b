"""Faults that tests must see: one line of the product each, and the tests that have to fail with it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """what: the fault in words. old: stands once in the file, and becomes `new`."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied_to(self, text: str) -> str:
        """Return a file's text with the fault in it. Raises ValueError if `old` does not stand there just once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file}: {self.old!r} stands there {text.count(self.old)} times, not once")
        return text.replace(self.old, self.new)


def _of(file: str, tests: str, *faults: tuple[str, str, str]) -> list[Mutant]:
    """Return the mutants of a file: (what, old, new) each. tests: files of tests/unit, separated by spaces."""
    paths = tuple(f"tests/unit/{name}.py" for name in tests.split())
    return [Mutant(what, file, old, new, paths) for what, old, new in faults]


MUTANTS: list[Mutant] = [
    *_of(
        "orchestrator/generation.py",
        "test_frontend",
        ("text held for a stop string is lost at the end", "text + shown.rest()", "text"),
        ("unfinished UTF-8 is lost at the end", "text += self._detokenizer.finish()", "pass"),
        ("requests are accepted while the server drains", "self.accepting = False", "pass"),
        ("draining does not wait", "while self.router.running and", "while False and"),
        ("what outlasts the grace is told nothing", "        self.router.leave(", "        str("),
        ("the token that ends the text is shown", "tokens = tokens[:-1]", "pass"),
        ("text behind a stop string goes on", "if stopped or part.finish_reason", "if part.finish_reason"),
        ("the error of a choice is swallowed", "                    raise item\n", "                    return\n"),
        ("choices outlive their request", "                task.cancel()", "                pass"),
        ("a request id is taken twice", "if self.router.is_open(record.session):", "if False:"),
    ),
    *_of(
        "orchestrator/router.py",
        "test_router",
        ("a request that kills targets is resumed for ever", "record.resumptions += 1", "pass"),
        ("resume_timeout never fires", "call_later(self._resume_timeout,", "call_later(1e9,"),
        ("resume_timeout fires at once", "call_later(self._resume_timeout,", "call_later(0,"),
        ("clients see that a target stops", "event.code != grpc.StatusCode.UNAVAILABLE.value[0]", "True"),
        ("a session is refused though another target has a place", "not (no_place and self._place_elsewhere(session))", "True"),
        ("a target that has refused a session is tried again", "record.refused_by.add(place.view.name)", "pass"),
        ("a refusal is not passed on", "self._tell(session, error_from_code(event.code, event.message))", "pass"),
        ("a repeated commit is told twice", "if self.ledger.apply(event) is not None:", "if self.ledger.apply(event) or 1:"),
        ("a gap is told to nobody", "self._tell(session, ServiceError(str(error)))", "pass"),
        ("a session stays in the ledger", "self.ledger.close(record.session)", "pass"),
        ("the deadline is forgotten", "put_nowait, late) if allowed", "put_nowait, late) if False"),
        ("sessions are not resumed", "        self._place(record, views)\n\n", "        pass\n\n"),
        ("a session goes where nothing was heard since its target was lost", "stream.found_at > self._lost_at or", "True or"),
        ("a target that drains is chosen", "and not stream.view.report.draining", ""),
        ("what waits at the end waits for ever", 'self.leave(Unavailable("the orchestrator is stopping"))', "self._following.cancel()"),
    ),
    *_of(
        "orchestrator/target_stream.py",
        "test_router",
        ("who leaves early leaves the session running", "self._outbox.put(Abort(name))", "pass"),
        ("a lost target counts as connected", "self._outbox, sessions = None, list(self._names)", "sessions = list(self._names)"),
        ("names are the same everywhere", "name_on_target(record.session, self._origin, number)", "record.session"),
        ("one bad event ends the stream for good", "            except Exception:", "            except KeyError:"),
    ),
    *_of(
        "orchestrator/routing.py",
        "test_routing",
        ("an old report counts", "if report.number <= self.report.number:", "if False:"),
        ("what is evicted is remembered", "self.prefixes.difference_update(report.evicted)", "pass"),
        ("what was sent is not counted", "self.unreported.append(tokens)", "pass"),
        ("prefixes do not matter", "view.expected_tokens - cached", "view.expected_tokens"),
        ("a full target is asked", "return queued > self.report.queue_places", "return False"),
    ),
    *_of(
        "orchestrator/ledger.py",
        "test_router test_sessions test_paged_kv",
        ("the count of resumptions is never reset", "        record.resumptions = 0\n", ""),
        ("a gap is written down", "        if base > held:", "        if False:"),
        ("a repeat is written down again", "        if base < held or not commit.tokens:", "        if not commit.tokens:"),
        ("a repeat that differs goes unseen", "!= commit.tokens:", "== 0:"),
        ("a resumed session lacks its new tokens", "tokens=list(self.tokens),", "tokens=self.tokens[: self.prompt_tokens],"),
    ),
    *_of(
        "orchestrator/text.py",
        "test_text",
        ("a part of a stop string is shown", "cut = len(self._held) - keep", "cut = len(self._held)"),
        ("half characters are shown", "or text.endswith(_INCOMPLETE)", ""),
        ("the later of two stop strings counts", "end, begin = min(found)", "end, begin = max(found)"),
    ),
    *_of(
        "target_service/servicer.py",
        "test_target_streams",
        ("sessions of a lost gateway are kept", "                self._verifier.abort(written.request.session)\n", "                pass\n"),
        ("a closed session's name is kept", "                    account.close(event.session)", "                    pass"),
        ("an aborted session's name is kept", "account.close(request.session)", "pass"),
        ("anybody may abort", "isinstance(request, Abort) and request.session in account:", "isinstance(request, Abort):"),
        ("one bad session ends the stream of all", "outbox.put(Closed(name, error.status.value[0], str(error)))", "raise"),
        ("a bad event of a draft goes unpunished", "self._verifier.protocol.reject(peer, name, error)", "pass"),
        ("a draft that does not fit is taken", "        if mismatch:", "        if False:"),
        ("the reason of a refusal is forgotten", 'self.refusal = f"draft and target do not fit: {mismatch}"', 'self.refusal = ""'),
        ("a lost draft stays attached", "            self._verifier.protocol.detach(peer)", "            pass"),
        ("what a draft leaves unread has no limit", "Outbox(self._verifier.settings.most_unread_tokens)\n        peer = DraftPeer", "Outbox()\n        peer = DraftPeer"),
    ),
    *_of(
        "target_service/left_sessions.py",
        "test_left_sessions",
        ("a finished session's name is kept", "self._open.pop(commit.at.session)", "written"),
        ("another's session is taken up", "key = asked.caller, name", "key = '', name"),
        ("what is left is kept for ever", "if until <= now", "if False"),
        ("another request takes a session up", "and written.follows(request)", ""),
    ),
    *_of(
        "target_service/service.py",
        "test_target_streams",
        ("a target that stops tells its sessions nothing", 'verifier.close_all(Unavailable("the target is stopping"))', "pass"),
    ),
    *_of(
        "target_service/verifier.py",
        "test_target_streams test_target_sessions",
        ("tokens of NaN logits are committed", "        if not output.finite:", "        if False:"),
        ("KV of NaN logits is left for others", "            self.runner.kv.scrub(session.kv)\n", ""),
        ("sessions of a failed step hang", "            session.fail(ServiceError(f", "            str((f"),
        ("a finished session keeps its pages", "                self.admission.close(session)\n            return\n", "                pass\n            return\n"),
    ),
    *_of(
        "target_service/commit.py",
        "test_target_sessions test_sessions",
        ("a stop token is passed over", "        if token in stop_token_ids:", "        if False:"),
        ("more tokens than were asked for", "return tokens[:room], FinishReason.LENGTH", "return tokens, FinishReason.LENGTH"),
        ("KV of rejected tokens is kept", "kv.truncate(session.kv, len(session.tokens) - 1 + under_way)", "pass"),
        ("an accepted token is lost", "*proposed[:accepted], following]", "*proposed[: accepted - 1], following]"),
        ("a round of an epoch that is over counts", "proposal is not None and (proposal.at.epoch, proposal.at.round) == key", "proposal is not None"),
    ),
    *_of(
        "target_service/going_ahead.py",
        "test_going_ahead",
        ("a session that comes waits for ever", "if alike and all(waits(session) for session in sessions if id(session) not in places):", "if alike:"),
        ("a session runs beyond its length", "if len(session.tokens) + 1 < session.max_length", "if True"),
        ("a token is drawn by the last one's number", "base = len(session.tokens) + 1", "base = len(session.tokens)"),
        ("rounds of any kind follow each other", "alike = all(_drafted_by_itself(item) == drafted for item in running.rounds)", "alike = True"),
    ),
    *_of(
        "engine/passes/behind_steps.py",
        "test_going_ahead",
        ("a round begins where nothing was accepted", "accepted = given[\"left_accepted\"][place].where(taken, 0)", "accepted = given[\"left_accepted\"][place] * 0"),
        ("KV is written where nothing was accepted", "slots.copy_((page", "slots.clone().copy_((page"),
        ("tokens turn by the lowest position", "positions += accepted[:, None]", "positions = positions + accepted[:, None]"),
        ("uniforms are those of the lowest position", "+ accepted[:, None]\n            given[name]", "+ 0 * accepted[:, None]\n            given[name]"),
        ("the token given is run", "first.copy_(given", "first.clone().copy_(given"),
        ("verdicts that are imposed are not taken", "left[: len(given)].copy_(torch.tensor", "left[: len(given)].clone().copy_(torch.tensor"),
    ),
    *_of(
        "target_service/behind_rounds.py",
        "test_draft_in_target",
        ("a prompt that is not read is judged", "session.unread <= 0 and not", "not"),
        ("a round that was refused counts", "item.is_void = True\n", "pass\n"),
        ("rules are left out", "session.logprobs is not None or bool(session.rules)", "session.logprobs is not None"),
        ("sampled sessions of three levels need no host", "drawn_from = screened and", "drawn_from = False and"),
        ("what is held is taken for what is proposed", "item.input.tokens[1 + item.held :] =", "item.input.tokens[1:] ="),
    ),
    *_of(
        "engine/rounds/buffers.py",
        "test_warm_up",
        ("a shorter round has no room for what a longer one guessed", "(shape.rows, settings.gamma + 1)", "(shape.rows, passes)"),
    ),
    *_of(
        "engine/step_loop.py",
        "test_step_loop",
        ("nothing is made ready but for requests", "(warm_up := warm_up_more()) is not None", "(warm_up := warm_up_more()) is ..."),
    ),
    *_of(
        "engine/passes/behind_rounds.py",
        "test_behind_rounds",
        ("a sequence takes what another's round has left", "given[\"behind\"].long().clamp(min=0)", "torch.arange(len(given[\"behind\"]), device=given[\"behind\"].device)"),
        ("what the host brings is overwritten", "given[\"behind\"] >= 0", "given[\"behind\"] >= -1"),
        ("tokens come one row late", "row - starts[sequence] - 1  #", "row - starts[sequence] - 2  #"),
        ("what was drafted takes the place of what is held", ' - given["held"][:, None]', ""),
        ("what other rounds had announced is read", "            self.bitmaps.zero_()\n", "            pass\n"),
    ),
    *_of(
        "engine/rounds/behind_steps.py",
        "test_behind_steps",
        ("held tokens count as drafted ones", "(accepted - before).clamp(min=0)", "accepted"),
        ("rejected tokens count as accepted", "judged).where(taken, 0).long()", "judged).where(taken, 0).long() * 0"),
        ("tokens are drawn as if all were accepted", '"uniforms", "limits", "words"):', '"limits", "words"):'),
    ),
    *_of(
        "kernels/shared_top_k/launch.py",
        "test_shared_top_k",
        ("scores that are nearly alike are not told apart", "for again in (False, True):", "for again in (False,):"),
    ),
    *_of(
        "draft_service/drafter.py",
        "test_draft_sessions",
        ("a draft that does not go ahead runs its last token", "runs_last=settings.ahead)", "runs_last=True)"),
    ),
    *_of(
        "target_service/confirm_lengths.py",
        "test_confirm_lengths",
        ("a dense pass costs nothing", "(rounds * each + (1 - self.share) * tokens)", "(rounds * each)"),
        ("all is confirmed", "kept = chance**held", "kept = 1.0"),
        ("what was seen is never forgotten", "FORGOTTEN * max(0.0, LIKELY - chance)", "0.0"),
    ),
    *_of(
        "target_service/round_costs.py",
        "test_controller",
        ("the capture of a graph counts as a round", "OUTLIER * seconds < self.seconds", "False"),
    ),
    *_of(
        "sparsity/reader.py",
        "test_screening",
        ("the first round of a session that is screened is sparse", "(everything or not self._has_weighed)", "everything"),
    ),
    *_of(
        "kernels/shared_budget.py",
        "test_shared_budget",
        ("what is read in any case takes room", "(forced.sum((1, 2)) - outside)", "forced.sum((1, 2))"),
    ),
    *_of(
        "target_service/self_drafting.py",
        "test_self_drafting",
        ("what is seen of drafted tokens is never forgotten", "FORGOTTEN * max(0.0, EXPECTED - self.chance)", "0.0"),
        ("a pass takes no more than its bytes", " + BEYOND_BYTES * step_tokens", ""),
        ("as many tokens as may be are drafted", "best = max(rates, key=rates.__getitem__)", "best = max(rates)"),
    ),
    *_of(
        "target_service/screening.py",
        "test_screening",
        ("what gave way is told nevertheless", "        del tokens[self.confirmed :], self.supports[:]\n", "        del self.supports[:]\n"),
        ("what confirmations read is weighed but once", "self.most > 0 and self.unweighed + 1 >= WEIGHED_EVERY", "False"),
        ("a session's chance is not kept", "self.chance = chance_behind(", "chance_behind("),
        ("what a held token was drawn from is forgotten", "        self.supports += supports[: len(commit.tokens)]\n", "        self.supports += supports[:1]\n"),
    ),
    *_of(
        "engine/judging.py",
        "test_judging",
        ("both levels draw by the same uniforms", "(USE_SCREEN_ACCEPT, USE_SCREEN_DRAW) if", "(USE_ACCEPT, USE_TARGET) if"),
    ),
    *_of(
        "target_service/planning.py",
        "test_screening",
        ("nothing is ever confirmed but at the end", "    too_many = len(session.tokens)", "    too_many = 0 * len(session.tokens)"),
        ("no round is screened", "    return not proposed or too_many", "    return True or too_many"),
        ("one session confirms while others screen", "    if not holding and len(confirm) < len(screened):", "    if True:"),
        ("held tokens whose KV was cut are screened on", "screening.is_stale or is_cut", "screening.is_stale"),
    ),
    *_of(
        "target_service/planning.py",
        "test_draft_in_target",
        ("one that holds nothing has all go by turns", "weighs = confirms is not Confirms.YES", "weighs = confirms is Confirms.WEIGHING"),
    ),
    *_of(
        "target_service/planning.py",
        "test_target_sessions test_sessions",
        ("a silent draft is waited for forever", "    if now - session.stats.waiting_since < draft_timeout:", "    if True:"),
        ("no draft is waited for", "    if now - session.stats.waiting_since < draft_timeout:", "    if False:"),
    ),
    *_of(
        "orchestrator/supervision.py",
        "test_supervision",
        ("where a service has moved is told to nobody", "        put(name, address)", "        pass"),
        ("who cannot say where a service is ends the launch", "except Exception:  # Ray is not", "except KeyError:  # Ray is not"),
        ("a service that was replaced is not looked for", "            elif not serves:", "            elif False:"),
    ),
    *_of(
        "orchestrator/service_status.py",
        "test_draft_links test_status",
        ("drafts are told at changes alone", "targets.changed(), BEAT_SECONDS)", "targets.changed(), 1e9)"),
        ("only one target counts", "            total.update(status.gauges)", "            total = Counter(status.gauges)"),
    ),
    *_of(
        "draft_service/link.py",
        "test_draft_links",
        ("links to targets of before are kept", "self._links.pop(target)[1].cancel()", "self._links.pop(target)"),
        ("links that stand are made anew", "            if target not in self._links:", "            if True:"),
    ),
    *_of(
        "target_service/protocol.py",
        "test_target_sessions test_sessions",
        ("a proposal of an old epoch is taken", "if at.epoch < session.epoch or at.round < session.round:", "if at.round < session.round:"),
        ("a proposed token outside the vocabulary is taken", "if max(event.tokens) >= vocab or", "if max(event.tokens) < 0 or"),
        ("longer proposals than γ are taken", "if max(event.counts) > self._gamma:", "if False:"),
        ("proposals behind any tokens are taken", "elif event.outcomes != [(committed, session.tokens[-1])]:", "elif False:"),
        ("outcomes without end are taken", "if len(event.counts) > MAX_BRANCHES:", "if False:"),
        ("the draft placed beside a target is one of many", "_number(draft.name) != self._number", "False"),
        ("sessions of a lost draft wait for it", "            session.forget_draft()\n            self.assign(session)", "            self.assign(session)"),
        ("another's session can be drafted", "        if session is None or session.draft is not peer:\n            self._counters", "        if session is None:\n            self._counters"),
        ("a draft that asks for a verdict again gets none", "            peer.send(session.last_judged[1])", "            pass"),
    ),
    *_of(
        "target_service/admission.py",
        "test_target_sessions test_target_streams",
        ("sessions run beyond the KV room", "need + self._kept(running) <= free", "True"),
        ("an aborted session goes on waiting", "(self.preempted if session in self.preempted else self.queue).remove(session)", "pass"),
        ("pages of ended sessions stay held", "            self._kv.release(session.kv)\n        self._closed.clear()", "            pass\n        self._closed.clear()"),
        ("places go to the stream that has most", "running[waiting.emit]))", "-running[waiting.emit]))"),
        ("places go to the peer that has most", "(peers[self._peer_of(waiting)], running", "(-peers[self._peer_of(waiting)], running"),
        ("a peer's many streams keep others out of the queue", "peers = Counter(map(self._peer_of, self.queue))\n            greedy", "peers = Counter[str]()\n            greedy"),
        ("a name is opened twice", "if any(session.id == request.session for session in self.everyone()):", "if False:"),
    ),
    *_of(
        "target_service/verifier.py",
        "test_round_costs",
        ("a step beside a capture is a figure", "disturbed = bool(step.prefills) or self.runner", "disturbed = bool(step.prefills) or 0 * self.runner"),
    ),
    *_of(
        "target_service/round_costs.py",
        "test_controller",
        ("the first rounds of a load decide", "counts = figure.rounds > SETTLED * sessions_of(load)", "counts = figure.rounds > 0"),
    ),
    *_of(
        "target_service/controller.py",
        "test_controller",
        ("a slower way is chosen", "return max(faster,", "return min(faster,"),
        ("a useless draft is never paused", "        if choice == PLAIN:\n", "        if False:\n"),
        ("a pause never ends", "return committed < self.paused_until", "return bool(self.paused_until)"),
        ("nothing unknown is tried", "        for option in self._unknown(", "        for option in () and self._unknown("),
        ("an old text counts as much as a new one", "self._in_vain + 1, self._typical.as_prior()", "self._in_vain + 1, self._typical"),
    ),
    *_of(
        "target_service/controller.py",
        "test_never_a_loss",
        ("the draft goes on beside plain rounds that are tried", "pace.resumed(seen.committed) if self.probe.gamma else", "pace.resumed(seen.committed) if True else"),
        ("each session chooses how many tokens it drafts", "        if is_odd:\n", "        if True:\n"),
        ("it is tried again as often, however often in vain", "* min(2**self._in_vain, LONGEST_WAIT)", ""),
        ("rounds of exact and approximate sessions are no figures", "for other, count in others.items() if other.gamma == kind.gamma", "for other, count in others.items() if other == kind"),
    ),
    *_of(
        "engine/rounds/requests.py",
        "test_outcomes",
        ("branches of many sessions are as many as of few", "max(2, min(most, MOST_ROWS // power_of_two(sequences)))", "most"),
    ),
    *_of(
        "draft_service/outcomes.py",
        "test_outcomes",
        ("unlikely outcomes come first", "others.sort(key=itemgetter(0), reverse=True)", "others.sort(key=itemgetter(0))"),
        ("the draft's own token is taken for another outcome", "if token != rejected", "if True"),
    ),
    *_of(
        "target_service/acceptance.py",
        "test_controller test_never_a_loss",
        ("what is not tried is never learnt of", "        for position in range(proposed, len(chances) if proposed else 0):", "        for position in ():"),
    ),
    *_of(
        "target_service/verifier.py",
        "test_never_a_loss",
        ("a target is never idle", "next(self.admission.everyone(), None) is None", "False"),
    ),
    *_of(
        "draft_service/verdicts.py",
        "test_draft_sessions test_sessions",
        ("a verdict said twice is applied twice", "    if verdict.at.round <= session.round:", "    if False:"),
        ("early verdicts gather without end", "    if len(session.early_verdicts) > _MOST_EARLY:", "    if False:"),
    ),
    *_of(
        "draft_service/drafter.py",
        "test_draft_sessions",
        ("a failed step of the draft leaves its sessions waiting", "            self.admission.fail(session, reason)", "            pass"),
        ("NaN proposals are sent", "if all(branch.probs is None or np.isfinite(branch.probs).all() for branch in output.branches):", "if True:"),
    ),
    *_of(
        "wire/streams.py",
        "test_router test_target_streams",
        ("a hung peer is waited for forever", "        while self._missed < PATIENCE:", "        while True:"),
        ("a peer that speaks counts as silent", "            listener.heard()\n", ""),
    ),
    *_of(
        "wire/outbox.py",
        "test_outbox test_target_streams",
        ("what waits has no limit", "or self._tokens > self._most_tokens", ""),
        ("a frame is too long for a message", "            if count and tokens > FRAME_TOKENS:\n                break\n", ""),
        ("an event is lost between two frames", "self._events[:count], self._events[count:]", "self._events[:count], self._events[count + 1 :]"),
    ),
    *_of(
        "wire/options.py",
        "test_options",
        ("no keepalive", '    ("grpc.keepalive_time_ms", 10_000),\n', ""),
        ("no limit to a ping", '    ("grpc.http2.ping_timeout_ms", 10_000),', '    ("grpc.keepalive_timeout_ms", 10_000),'),
    ),
    *_of(
        "wire/convert.py",
        "test_convert",
        ("a temperature near zero is taken", "np.float32(LEAST_TEMPERATURE) <= pb.temperature", "0 <= pb.temperature"),
        ("a token without probability is taken", "    if not possible.all():", "    if False:"),
        ("a distribution that sums to two is taken", " and (abs(sums - 1) <= 1e-3).all()", ""),
        ("counts that go beyond the tokens are taken", "    if sum(counts) != len(proposals.tokens):", "    if False:"),
        ("a name without end is taken", "if not session or len(session) > MOST_NAME:", "if not session:"),
    ),
    *_of(
        "wire/selection_codec.py",
        "test_selection_codec",
        ("a wrong checksum is taken", "    if _checksum(words) != checksum:", "    if False:"),
        ("bits beyond the last block are taken", "    if words.size and (words[:, -1] & ~last_word_mask(blocks)).any():", "    if False:"),
        ("another shape is taken", "    if shape != [heads, blocks]:", "    if False:"),
    ),
    *_of(
        "kernels/rejection/reference.py",
        "test_sampling test_rejection",
        ("the nucleus has a token too many", "before < top_p[:, None]", "before <= top_p[:, None]"),
        ("the nucleus is not renormalized", "return probs / probs.sum(-1, keepdim=True)", "return probs"),
    ),
    *_of(
        "engine/next_tokens.py",
        "test_draft_rounds",
        ("the draft's nucleus has a token too many", "(before < top_p[:, None])", "(before <= top_p[:, None])"),
    ),
]  # fmt: skip
