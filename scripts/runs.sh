# wiring_name <text>: the text of a wiring as part of a folder's name: "gqa(2) window(4)" is gqa_2_window_4.
wiring_name() { tr -c 'a-zA-Z0-9.\n' _ <<<"$1" | tr -s _ | sed 's/_$//'; }
# final_loss <run> <updates>: its validation loss after that update, from its log; nothing before it has come so far.
final_loss() {
  sed -n "s/^{\"step\":$2,\"val_loss\":\([0-9.e+-]*\)[,}].*/\1/p" "$1/log.jsonl" 2>/dev/null | tail -n 1
}
