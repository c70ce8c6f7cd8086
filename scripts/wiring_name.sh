# wiring_name <text>: the text of a wiring as part of a folder's name: "gqa(2) window(4)" is gqa_2_window_4.
wiring_name() { tr -c 'a-zA-Z0-9.\n' _ <<<"$1" | tr -s _ | sed 's/_$//'; }
