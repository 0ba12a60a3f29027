"""A full-screen program: shows what was typed between angle brackets; ctrl-l draws it all again."""

import curses


def main(screen):
    curses.raw()
    text = ""
    while True:
        screen.erase()
        screen.addstr(1, 0, f"<{text}>")
        screen.refresh()
        key = screen.getch()
        if key == 12:
            screen.clear()
        elif 32 <= key < 127:
            text += chr(key)


curses.wrapper(main)
